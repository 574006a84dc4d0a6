"""Line 2: hostile chat templates end in an error within 3 s and 256 MiB, and nobody else notices.

Each directed template is asked for in a system that also serves the shipped model: how long it
takes, what its processes grow by, how fast /health answers meanwhile, and how even another stream
stays. Then 20,000 random templates, by the fuzzer's target.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
from fleet import Fleet
from hostile_templates import ENDLESS, HUGE
from tiny_models import shipped_model, write_tiny

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from fuzz.run import run

MOST_S, MOST_BYTES, HEALTH_S, TIMES = 3.0, 256 << 20, 0.1, 2.0
TOKENS, RANDOM = 250, 20_000
SHIPPED = "SmolLM2-135M-Instruct"


async def gaps(client: httpx.AsyncClient) -> list[float]:
    """Seconds between the tokens of one stream of the shipped model."""
    body = {"model": SHIPPED, "prompt": "A stream goes on", "max_tokens": TOKENS, "stream": True}
    came = []
    async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
        answer.raise_for_status()
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
    """The worst of what others see: seconds of /health, bytes of the gateway and its children."""
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
    """Of the gateway and its text processes together, so that none has grown by more."""
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
        return asyncio.run(measure(fleet))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: directed(Path(folder), str(number), template)
            for number, (name, template) in enumerate({**ENDLESS, **HUGE}.items())
        }
    outcomes, error = run("template", 0, RANDOM)
    ok = all(part["ok"] for part in found.values()) and not error and outcomes.total() == RANDOM
    print(json.dumps({"ok": ok, "directed": found, "random": dict(outcomes), "error": error}))


if __name__ == "__main__":
    main()
