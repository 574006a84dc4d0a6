"""An ordinary run of `pdserve up` logs no warning and leaves no files."""

import re
import signal
from pathlib import Path

import httpx
import pytest
from systems.fleet import Fleet

WORRYING = re.compile(r".*(?:WARNING|ERROR|CRITICAL|Traceback|warning:).*")
STOP_S = 60


@pytest.mark.extended
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGINT, ("--decode", "2")),
        (signal.SIGTERM, ("--prefill", "0")),
    ],
)
def test_an_ordinary_run_logs_no_warning(
    tmp_path: Path, number: signal.Signals, options: tuple[str, ...]
) -> None:
    env = {"TMPDIR": str(tmp_path)}
    words = ("--kv-tokens", "4096", *options)
    with Fleet(*words, certificates=True, drain_s=STOP_S, env=env) as fleet:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        reply = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60)
        reply.raise_for_status()
        fleet.process.send_signal(number)
        fleet.process.wait(STOP_S)
    assert fleet.exit_code == 0
    assert WORRYING.findall(fleet.final_log) == []
    assert list(tmp_path.iterdir()) == []
