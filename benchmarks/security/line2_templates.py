"""Line 2: hostile chat templates end in an error within 3 s and 256 MiB, without effect on others.

Each directed template is requested in a system that also serves the shipped model: its duration,
the growth of its processes, the response time of /health meanwhile, and the gaps of another stream.
Then RANDOM templates of the fuzzer's, each in a separate worker under a gateway's default limits:
the duration of each, and the growth of its worker. These are not sent to a gateway.
"""

import asyncio
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
from builders.hostile_templates import ENDLESS, HUGE, LONG, ForkedWorker
from builders.tiny_models import shipped_model, write_tiny
from systems.fleet import Fleet

from pdserve.gateway.main import make_text_limits
from pdserve.gateway.settings import GatewaySettings

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from fuzz.targets.template import draw

MOST_S, MOST_BYTES, HEALTH_S, TIMES = 3.0, 256 << 20, 0.1, 2.0
TOKENS, RANDOM = 250, 20_000
PROCESSES, LOADED_BYTES = 2, 16 << 20  # a tokenizer of the random templates' model
DIRECTED = {**ENDLESS, **{f"huge {name}": t for name, t in HUGE.items()}, **LONG}
SHIPPED = "SmolLM2-135M-Instruct"


async def gaps(client: httpx.AsyncClient) -> list[float]:
    """Seconds between the tokens of one stream of the shipped model."""
    body = {"model": SHIPPED, "prompt": "A stream goes on", "max_tokens": TOKENS, "stream": True}
    came = []
    async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
        if answer.status_code != 200:
            raise RuntimeError(
                f"a stream got {answer.status_code}: {(await answer.aread())[:500]!r}"
            )
        async for line in answer.aiter_lines():
            if '"text"' in line:
                came.append(time.perf_counter())
    return [b - a for a, b in pairwise(came)]


async def ask(client: httpx.AsyncClient) -> tuple[int, float]:
    """Status and seconds of a chat with the hostile template."""
    body = {"model": "hostile", "messages": [{"role": "user", "content": "hello"}]}
    began = time.perf_counter()
    answer = await client.post("/v1/chat/completions", json=body)
    return answer.status_code, time.perf_counter() - began


@asynccontextmanager
async def watched(client: httpx.AsyncClient, gateway: int) -> AsyncIterator[dict[str, float]]:
    """The worst values seen by others: seconds of /health, bytes of the gateway and its
    children."""
    worst = {"health_s": 0.0, "bytes": 0.0}

    async def health() -> None:
        while True:
            began = time.perf_counter()
            (await client.get("/health")).raise_for_status()
            worst["health_s"] = max(worst["health_s"], time.perf_counter() - began)
            await asyncio.sleep(0.02)

    async def memory() -> None:
        while True:
            worst["bytes"] = max(worst["bytes"], float(private_bytes(gateway)))
            await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(health()), asyncio.create_task(memory())]
    try:
        yield worst
    finally:
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [e for e in done if not isinstance(e, asyncio.CancelledError)]
    if errors:
        raise RuntimeError(f"not watched to the end: {errors}")


def private_bytes(gateway: int) -> int:
    """Memory of the gateway and its text processes together, so that none has grown by more."""
    total = 0
    process = psutil.Process(gateway)
    for one in (process, *process.children(recursive=True)):
        try:
            memory = one.memory_info()
            total += memory.rss - memory.shared
        except psutil.NoSuchProcess:
            continue
    return total


async def measure(fleet: Fleet) -> dict[str, Any]:
    gateway = fleet.pids("gateway")[0]
    async with httpx.AsyncClient(base_url=fleet.url, timeout=60) as client:
        calm = statistics.quantiles(await gaps(client), n=100)[98]
        before = private_bytes(gateway)
        async with watched(client, gateway) as worst:
            others = asyncio.create_task(gaps(client))
            answers = [await ask(client)]
            while not others.done():
                answers.append(await ask(client))
            beside = statistics.quantiles(await others, n=100)[98]
    statuses = sorted({status for status, _ in answers})
    slowest, grown = max(took for _, took in answers), worst["bytes"] - before
    return {
        "ok": statuses[0] >= 400 and slowest <= MOST_S and grown <= MOST_BYTES
        and worst["health_s"] <= HEALTH_S and beside <= TIMES * calm,
        "asks": len(answers),
        "statuses": statuses,
        "slowest_s": round(slowest, 2),
        "grown_mib": round(grown / 2**20),
        "health_ms": round(1e3 * worst["health_s"], 1),
        "gap_p99_ms": [round(1e3 * calm, 1), round(1e3 * beside, 1)],
    }  # fmt: skip


def directed(folder: Path, name: str, template: str) -> dict[str, Any]:
    model = write_tiny(folder / name / "hostile", "llama", seed=1)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    text = json.dumps(settings | {"chat_template": template})
    (model / "tokenizer_config.json").write_text(text)
    options = ("--model", str(shipped_model()), "--model", str(model), "--prefill", "0")
    with Fleet(*options, "--threads", "1", certificates=True) as fleet:
        try:
            return asyncio.run(measure(fleet))
        except BaseException:
            print(fleet.log(), file=sys.stderr)
            raise


def at_random(first: int, end: int) -> tuple[Counter[str], float, int]:
    """The outcomes of the templates of these seeds, the longest duration in seconds, the largest
    growth in bytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    worker = ForkedWorker(make_text_limits(GatewaySettings()))
    slowest, outcomes = 0.0, Counter[str]()
    for seed in range(first, end):
        source = draw(Random(f"template {seed}"))
        began = time.perf_counter()
        outcomes[worker.chat(source)[0]] += 1
        slowest = max(slowest, time.perf_counter() - began)
    forks, own = (
        resource.getrusage(who).ru_maxrss << 10
        for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)
    )
    return outcomes, slowest, forks - own


def random_half() -> dict[str, Any]:
    """Run the random templates in processes without threads, which may fork."""
    bounds = [RANDOM * n // PROCESSES for n in range(PROCESSES + 1)]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(at_random, bounds, bounds[1:]))
    outcomes = sum((part[0] for part in parts), Counter[str]())
    slowest, largest = max(part[1] for part in parts), max(part[2] for part in parts)
    return {
        "ok": outcomes.total() == RANDOM
        and slowest <= MOST_S
        and largest <= MOST_BYTES + LOADED_BYTES,
        "outcomes": dict(outcomes),
        "slowest_s": round(slowest, 2),
        "grown_mib": round(largest / 2**20),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: directed(Path(folder), str(number), template)
            for number, (name, template) in enumerate(DIRECTED.items())
        }
    drawn = random_half()
    ok = all(part["ok"] for part in found.values()) and drawn["ok"]
    print(json.dumps({"ok": ok, "directed": found, "random": drawn}))


if __name__ == "__main__":
    main()
