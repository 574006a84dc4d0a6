"""A real system answers: short prompts stay local, long ones go remote, and nothing of it stays.

What goes over each transport is in test_edges.py.
"""

import os
import socket
from pathlib import Path
from typing import Any

import openai
import psutil
from eventually import LIMIT_S, wait_until
from fleet import Fleet

LONG = "The quick brown fox jumps over the lazy dog. " * 60  # about 600 tokens
SHORT = "Name the capital of France."


def ask(fleet: Fleet, text: str, **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    return client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=12,
        temperature=0,
        **options,
    )


def test_a_long_prompt_goes_remote_and_a_short_one_stays(tmp_path: Path) -> None:
    """Over shm, whose sockets and memory are gone when the system has stopped, like all else."""
    env = {"TMPDIR": str(tmp_path)}
    options = ("--kv-transport", "shm", "--kv-tokens", "16384")
    with Fleet(*options, env=env, drain_s=30) as fleet:
        family = psutil.Process(fleet.process.pid).children(recursive=True)
        assert len(family) >= 4
        short = ask(fleet, SHORT)
        assert (fleet.prefills("local"), fleet.prefills("remote")) == (1, 0)
        long = ask(fleet, LONG)
        assert (fleet.prefills("local"), fleet.prefills("remote")) == (1, 1)
        assert "Paris" in short.choices[0].message.content
        assert long.usage.prompt_tokens > 512
        assert long.usage.completion_tokens > 0
        wait_until(
            lambda: fleet.metric("pdserve_transfer_bytes_total", transport="shm") > 0,
            "the workers' next load report",
        )
        wait_until(lambda: "prefill_at=shm" in fleet.log(), "the gateway's line")

        # The decode worker now has the prefix: the same prompt needs no other worker.
        again = ask(fleet, LONG)
        assert again.choices[0].message.content == long.choices[0].message.content
        assert again.usage.prompt_tokens_details.cached_tokens > 0
        assert fleet.prefills("local") == 2
        wait_until(fleet.all_blocks_back, "blocks back")
        host, port = fleet.url.removeprefix("http://").split(":")
    assert fleet.exit_code == 0, fleet.final_log
    assert "leaked" not in fleet.final_log  # as the bindings of the kernels would say
    gone, alive = psutil.wait_procs(family, timeout=LIMIT_S)
    assert not alive
    assert len(gone) == len(family)
    assert [p for p in tmp_path.iterdir() if "pdserve" in p.name] == []
    assert not [name for name in os.listdir("/dev/shm") if "pdserve" in name]
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0
