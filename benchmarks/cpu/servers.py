"""The server rows: the same closed-loop client against pdserve, mixed and split, and llama-server.

All servers stay up while another one is measured; idle ones use no core.
"""

import asyncio
import functools
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
from client import Wave, closed_loop
from machine import CORES
from peers import LLAMA_BIN, ROOT, say
from prompts import reference_tokenizer
from ratios import compared
from systems.fleet import Fleet
from weights import q4_0_gguf, shipped_gguf

WORKERS, REQUESTS, PROMPT, NEW = 32, 96, 128, 64
VOCAB = 49152  # of SmolLM2
# Failed requests per run: llama-server cuts off some answers in which a token ends within a
# character ("unparsed Content-only output" in its log), always the same ones; another prompt is
# sent instead. pdserve may not fail at all.
LLAMA_SPARES = 8
MIXED, SPLIT = "pdserve up --prefill 0", "pdserve up, split"
LLAMA, LLAMA_Q4_0 = "llama-server", "llama-server q4_0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LlamaServer:
    """llama-server with a slot for each worker; `ready_s` from its start to /health."""

    def __init__(self, model: Path, log: Path, options: Sequence[str] = ()) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log.open("wb")
        started = time.monotonic()
        slots = ["-np", str(WORKERS), "-c", str(WORKERS * 256)]
        threads = ["-t", str(CORES), "-tb", str(CORES)]
        self._process = subprocess.Popen(
            [str(LLAMA_BIN / "llama-server"), "-m", str(model), *threads, *slots,
             "--port", str(port), "--no-ui", *options],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > started + 120:
                self.close()
                raise RuntimeError(f"llama-server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.01)
        self.ready_s = time.monotonic() - started

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def __enter__(self) -> "LlamaServer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def model_name(url: str) -> str:
    """The first model that a server lists."""
    listed = httpx.get(f"{url}/v1/models", timeout=30).raise_for_status().json()
    return str(listed["data"][0]["id"])


@functools.cache
def text_slices() -> list[tuple[int, ...]]:
    """Slices of this repository's prose at different offsets, in a fixed random order."""
    texts = [(ROOT / name).read_text() for name in ("benchmarks/text/prose.txt", "LICENSE")]
    ids = reference_tokenizer().encode("\n\n".join(texts))
    slices = [tuple(ids[at : at + PROMPT]) for at in range(len(ids) - PROMPT)]
    random.Random(0).shuffle(slices)
    return slices


def wave(url: str, number: int, num_spares: int = 0) -> Wave:
    """Run `number`, with prompts that no server has seen."""
    slices = text_slices()
    prompts = slices[number * REQUESTS : (number + 1) * REQUESTS]
    spares = slices[::-1][number * LLAMA_SPARES :][:num_spares]
    if len(slices) < (number + 1) * (REQUESTS + LLAMA_SPARES):
        raise ValueError(f"the text is too short for run {number}")
    return asyncio.run(closed_loop(url, model_name(url), prompts, NEW, WORKERS, spares))


def remote_wave(fleet: Fleet, number: int) -> Wave:
    """A run of the split system; raises RuntimeError unless every prefill was remote."""
    before = fleet.prefills("remote"), fleet.prefills("local")
    done = wave(fleet.url, number)
    moved = fleet.prefills("remote") - before[0], fleet.prefills("local") - before[1]
    if moved != (REQUESTS, 0):
        raise RuntimeError(f"{moved[0]} remote and {moved[1]} local prefills of {REQUESTS}")
    return done


def serve_rows(pairs: int, logs: Path) -> dict[str, dict[str, object]]:
    """Rows of the table that need servers; one warm-up run each, then `pairs` rounds."""
    with ExitStack() as stack:
        llama = stack.enter_context(LlamaServer(shipped_gguf(), logs / "llama-server.log"))
        q4_0 = stack.enter_context(LlamaServer(q4_0_gguf(), logs / "llama-server-q4_0.log"))
        mixed = stack.enter_context(Fleet("--prefill", "0", "--threads", str(CORES)))
        split = stack.enter_context(
            Fleet("--prefill", "1", "--decode", "1", "--remote-prefill", "always")
        )
        ways: dict[str, Callable[[int], Wave]] = {
            MIXED: lambda n: wave(mixed.url, n),
            LLAMA: lambda n: wave(llama.url, n, LLAMA_SPARES),
            SPLIT: lambda n: remote_wave(split, n),
            LLAMA_Q4_0: lambda n: wave(q4_0.url, n, LLAMA_SPARES),
        }
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        firsts: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(pairs + 1):
            for name, run in ways.items():
                done = run(number)
                say(
                    f"{name}: {done.tokens_per_s:.1f} tok/s, TTFT p50 {done.first_p50_s:.3f} s"
                    f", {done.failed} failed"
                )
                if number:  # the first round warms up
                    speeds[name].append(done.tokens_per_s)
                    firsts[name].append(done.first_p50_s)
    return {
        name: compared(figures[ours], figures[theirs], less_is_better=figures is firsts)
        for name, figures, ours, theirs in (
            ("server_32_llamacpp", speeds, MIXED, LLAMA),
            ("server_32_q4_0", speeds, MIXED, LLAMA_Q4_0),
            ("split_32_llamacpp", speeds, SPLIT, LLAMA),
            ("server_ttft_llamacpp", firsts, MIXED, LLAMA),
        )
    }


if __name__ == "__main__":
    print(serve_rows(int(sys.argv[1]), Path(sys.argv[2])))
