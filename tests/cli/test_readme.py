"""Run the Python examples of README and docs as written, except those of docs/python.md, which
tests/llm/test_python_page.py runs. tests/test_doc_commands.py checks the other blocks.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from oracles.doc_blocks import blocks

PORTS = ("8000", "8001", "50050")
EXAMPLES = {str(one): one.text for one in blocks("python") if one.page != "docs/python.md"}
SHELL = [one.text for one in blocks("sh") if one.page == "README.md"]


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, str]]:
    """Run a system with the flags that the pages name; return its ports by those in the pages."""
    probes = [socket.socket() for _ in PORTS]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    free = {name: str(p.getsockname()[1]) for name, p in zip(PORTS, probes, strict=True)}
    for probe in probes:
        probe.close()
    words = ["--port", free["8000"], "--grpc-port", free["8001"]]
    words += ["--router-port", free["50050"], "--api-key", "KEY", "--prefill", "0"]
    words += ["--kv-tokens", "4096", "--chunk-size", "128", "--log-level", "warning"]
    up = subprocess.Popen(
        [sys.executable, "-m", "pdserve.cli.main", "up", *words],
        stdout=subprocess.PIPE,
        text=True,
    )
    with up:
        assert up.stdout is not None
        ready = any("pdserve is ready" in line for line in up.stdout)
        if ready:
            yield free
        up.send_signal(signal.SIGINT)
        assert ready
        assert up.wait(60) == 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.startswith("README") else pytest.mark.extended)
        for name in EXAMPLES
    ],
)
def test_python_examples_run(name: str, ports: dict[str, str]) -> None:
    code = EXAMPLES[name]
    for written, free in ports.items():
        code = code.replace(f":{written}", f":{free}")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 2


def test_the_curl_line_works(ports: dict[str, str]) -> None:
    (line,) = [text for text in SHELL if "curl" in text]
    line = line.replace(":8000", f":{ports['8000']}")
    line = line.replace("curl ", "curl -s -m 60 -H 'Authorization: Bearer KEY' ")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert '"content":' in done.stdout, done.stdout + done.stderr


def test_there_are_examples_of_every_entry_point() -> None:
    text = "\n".join(EXAMPLES.values())
    for word in ("OpenAI(", "Anthropic(", "Client(", "TextStub", "RouterStub", "import LLM"):
        assert word in text


def test_the_first_two_commands_run_and_test() -> None:
    commands = [line.split("#")[0].strip() for line in SHELL[0].splitlines()]
    assert commands == ["make run", "make test"]
