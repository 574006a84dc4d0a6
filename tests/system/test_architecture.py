"""docs/architecture.md matches the code: a long request calls the listed functions in the listed
order."""

import re
import time
from pathlib import Path

import httpx
import pytest
from systems.fleet import Fleet

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/architecture.md").read_text()
STEPS = re.findall(r"^\d+\. `(pdserve\.[\w.]+:[\w.]+)`", TEXT, re.MULTILINE)

# Every Python process of the system imports this module first. It records each call of a listed
# function.
SITE = """
import os, sys, threading, time

STEPS = {}
for step in os.environ["TRACED_STEPS"].split():
    module, name = step.split(":")
    STEPS[name] = (module.removeprefix("pdserve.").replace(".", "/") + ".py", step)
FILE = os.open(os.environ["TRACED_INTO"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note(frame, event, argument):
    if event == "call":
        code = frame.f_code
        found = STEPS.get(code.co_qualname)
        if found and code.co_filename.endswith(found[0]):
            os.write(FILE, f"{time.monotonic_ns()} {found[1]}\\n".encode())


sys.setprofile(note)
threading.setprofile(note)
"""


@pytest.mark.extended
def test_a_long_request_takes_the_documented_path(tmp_path: Path) -> None:
    assert len(STEPS) == len(re.findall(r"^\d+\. ", TEXT, re.MULTILINE)) > 0
    (tmp_path / "sitecustomize.py").write_text(SITE)
    notes = tmp_path / "notes"
    env = {
        "PYTHONPATH": str(tmp_path),
        "TRACED_STEPS": " ".join(STEPS),
        "TRACED_INTO": str(notes),
    }
    words = " ".join(f"{n} apples and {n} pears." for n in range(120))
    body = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 8,
        "stream": True,
    }
    with Fleet("--kv-transport", "tcp", env=env) as fleet:
        request = time.monotonic_ns()
        reply = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60)
        assert "[DONE]" in reply.raise_for_status().text
        assert fleet.prefills("remote") == 1, "the prompt was too short for remote prefill"
    first: dict[str, int] = {}
    for line in notes.read_text().splitlines():
        at, step = line.split()
        if int(at) >= request:
            first[step] = min(int(at), first.get(step, int(at)))
    assert sorted(first, key=first.__getitem__) == STEPS
