"""Line 1: README's two commands and the demo, in a fresh clone of the committed tree."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from pytest_line import ROOT, results


def make(clone: Path, *words: str, timeout_s: float) -> tuple[str, float]:
    """Output and seconds of one make target; raises if it fails."""
    started = time.monotonic()
    done = subprocess.run(
        ["make", *words], cwd=clone, capture_output=True, text=True, timeout=timeout_s
    )
    sys.stderr.write(done.stdout[-6000:] + done.stderr[-6000:])
    if done.returncode:
        raise SystemExit(f"make {' '.join(words)} failed with {done.returncode}")
    return done.stdout, round(time.monotonic() - started, 1)


def run_and_ask(clone: Path) -> dict[str, Any]:
    """Run `make run` from nothing until it answers a chat request, then press Ctrl-C."""
    started = time.monotonic()
    command = ["make", "run", "ARGS=--port 18555"]
    with subprocess.Popen(
        command, cwd=clone, stdout=subprocess.PIPE, stderr=sys.stderr, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if "pdserve is ready" in line:
                break
        else:
            raise SystemExit("make run ended before it was ready")
        ready_s = time.monotonic() - started
        body = {"model": "SmolLM2-135M-Instruct",
                "messages": [{"role": "user", "content": "Name the capital of France."}],
                "temperature": 0, "max_tokens": 16}  # fmt: skip
        request = urllib.request.Request(
            "http://127.0.0.1:18555/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"]
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
    return {"set_up_and_start_s": round(ready_s, 1), "answer": text}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "pdserve"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        first = run_and_ask(clone)
        demo, demo_s = make(clone, "demo", timeout_s=600)
        asked = re.findall(
            r"(short|long): (\d+) prompt tokens, prefilled ([\w ]+), ([\d.]+) s", demo
        )
        tests, tests_s = make(clone, "test", timeout_s=1500)
    counts = results(tests)
    figures = {
        "ok": "Paris" in first["answer"] and len(asked) == 4 and tests_s < 1200
        and len(counts) == 1 and "failed" not in "".join(counts),
        "make run": first,
        "make demo": {"seconds": demo_s, "questions": asked},
        "make test": {"seconds": tests_s, "results": counts},
    }  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
