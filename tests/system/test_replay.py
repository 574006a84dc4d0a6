"""The trace rings of a real system: each hand-off is complete across three processes, also after a
SIGKILL."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from builders.tiny_models import write_tiny
from oracles.rings import assert_conform
from systems.eventually import wait_until
from systems.fleet import Fleet

OPTIONS = ("--kv-tokens", "8192", "--weights", "float32")
REMOTE = ("--remote-prefill", "always", "--trace-mb", "1")


def replay(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdserve.cli.main", "replay", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def complete(url: str, seed: int, max_tokens: int) -> None:
    ids = [(17 * i + 31 * seed + 5) % 256 for i in range(100)]
    body = {"model": "tiny", "prompt": ids, "max_tokens": max_tokens, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == max_tokens


@pytest.mark.extended
def test_the_records_of_a_killed_worker_are_kept(tmp_path: Path, rings: Path) -> None:
    model = str(write_tiny(tmp_path / "tiny", "llama"))
    with Fleet("--model", model, *OPTIONS, *REMOTE) as fleet:
        complete(fleet.url, 1, 5)
        live = replay(str(rings), "--check")
        assert live.returncode == 0, live.stdout
        assert live.stdout.startswith("1 attempts")
        streams = [threading.Thread(target=complete, args=(fleet.url, n, 400)) for n in (2, 3)]
        for stream in streams:
            stream.start()
        (victim,) = fleet.pids("decode")
        # Wait for prefill's records too: decode's unsent reports would be lost with it.
        wait_until(lambda: assert_conform(rings)["send", "filled"] == 3, "all hand-offs")
        os.kill(victim, signal.SIGKILL)
        for stream in streams:
            stream.join(60)
        complete(fleet.url, 4, 5)
    noted = assert_conform(rings)
    assert len(list(rings.glob("decode-*.ring"))) == 2
    # Three hand-offs before the kill, two retries of the streams that it hit, and the last one.
    assert noted["receive", "handed"] == noted["send", "filled"] == 6
    assert noted["receive", "written"] == noted["send", "sent"] >= 6
    assert noted["route", "closed"] == noted["route", "opened"] >= 6

    lives = replay(str(rings)).stdout.strip().split("\n\n")
    lost = [life for life in lives if "closed: decode" in life]
    assert len(lost) == 2
    for life in lost:
        assert "receiving -> committed; send_complete, commit, report_done" in life
        assert "died" in life.splitlines()[-1]
    scenario = json.loads(replay(str(rings), "--seed").stdout)
    assert len(scenario["asks"]) == 4
    assert [(f["kind"], f["phase"]) for f in scenario["faults"]] == [("SIGKILL decode", "decoding")]
