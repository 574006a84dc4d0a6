"""A contender: a warm child process that answers each request line with one JSON line."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import CORES
from peers import LLAMA_CONTENDER, VLLM_PYTHON
from table import BF16, GEMMA, LLAMA, LLAMA_GEMMA, LLAMA_Q4_0, SHIPPED, VLLM, Work
from weights import bf16_folder, gemma_gguf, q4_0_gguf, shipped_gguf

HERE = Path(__file__).parent
START_S, RUN_S = 900.0, 300.0  # limits; vLLM compiles for a minute at its first start
MODELS = {
    SHIPPED: shipped_gguf,
    BF16: bf16_folder,
    GEMMA: gemma_gguf,
    LLAMA: shipped_gguf,
    LLAMA_Q4_0: q4_0_gguf,
    LLAMA_GEMMA: gemma_gguf,
    VLLM: bf16_folder,
}


def engine_command(model: Path | str, *options: str) -> list[str]:
    """The command for pdserve's Engine; `options` are fields of EngineConfig, as name=value."""
    script = str(HERE / "contend_pdserve.py")
    return [sys.executable, "-P", script, str(model), str(CORES), *options]


def llama_command(model: Path) -> list[str]:
    return [str(LLAMA_CONTENDER), str(model), str(CORES)]


def command(name: str, cores: list[int]) -> list[str]:
    """The command that runs a contender of the table."""
    model = MODELS[name]()
    if name == VLLM:
        cpus = ",".join(str(c) for c in cores)
        return [str(VLLM_PYTHON), str(HERE / "contend_vllm.py"), str(model), cpus]
    if name in (LLAMA, LLAMA_Q4_0, LLAMA_GEMMA):
        return llama_command(model)
    return engine_command(model)


class Contender:
    """A contender's process, started by the constructor; `with` or `close` ends it. Raises
    RuntimeError if it dies or is late."""

    def __init__(self, name: str, words: list[str], log: Path) -> None:
        self.name = name
        self._log = log.open("wb")
        self.log_path = log
        started = time.monotonic()
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": str(HERE), "PYTHONUNBUFFERED": "1"},
        )
        self.pid = self._process.pid
        self.ready = self._answer(START_S)
        self.start_s = time.monotonic() - started

    def run(self, work: Work, number: int) -> float:
        """Tokens per second in the phase of the work."""
        request = f"run {work.batch} {work.prompt} {work.new} {number}"
        seconds = self.ask(request)
        if work.phase == "prefill":
            return work.batch * work.prompt / float(seconds["prefill_s"])
        return work.batch * (work.new - 1) / float(seconds["decode_s"])

    def ask(self, line: str) -> dict[str, Any]:
        """The answer to any request."""
        assert self._process.stdin
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the end of the answer is explained below
        return self._answer(RUN_S)

    def _answer(self, within_s: float) -> dict[str, Any]:
        out = self._process.stdout
        assert out
        deadline = time.monotonic() + within_s
        text = b""
        while not text.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                raise RuntimeError(f"{self.name} has not answered within {within_s:g} s")
            piece = os.read(out.fileno(), 65536)
            if not piece:
                tail = self.log_path.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.name} ended with {self._process.wait(10)}:\n{tail}")
            text += piece
        answer = json.loads(text)
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> "Contender":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
