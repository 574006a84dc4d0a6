"""Mixed requests leave no descriptor, thread, block or memory behind in any process.

A batch whose load peaks higher than before may enlarge a pool of threads, connections or tokenizer
workers, all of which have a maximum. A leak grows in every batch.
"""

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from systems.eventually import wait_until
from systems.fleet import Fleet

pytestmark = [pytest.mark.extended, pytest.mark.timeout(3600)]

BATCH, MAX_BATCHES, CLIENTS = 500, 4, 16
WORDS = "one two three four five six seven eight nine ten eleven twelve "
KINDS = ("short", "long", "stream", "leave", "choices", "refused", "prefix")
ROLES = ("gateway", "router", "prefill", "decode")
GROWTH = 1.10  # of resident memory in a batch
IDLE_S = 6  # after it, idle connections are closed
LATE_S = 40.0  # after it, they and gRPC's idle threads are gone on a busy machine too
WAIT_S = 1500.0  # of a request: on a busy machine, most clients wait for the one prefill worker


async def send(client: httpx.AsyncClient, model: str, number: int) -> str:
    """Send a request of a random kind; return the kind."""
    draw = random.Random(number)
    kind = draw.choice(KINDS)
    size = {"long": draw.randrange(20, 40), "prefix": 50}.get(kind, draw.randrange(1, 12))
    body: dict[str, Any] = {
        "model": model,
        "prompt": ("" if kind == "prefix" else f"{number} ") + WORDS * size,
        "max_tokens": 400 if kind == "leave" else draw.randrange(1, 12),
        "temperature": draw.choice([0, 1]),
        "seed": number,
        "n": 3 if kind == "choices" else 1,
        "stream": kind in ("stream", "leave"),
        "top_p": 7 if kind == "refused" else 1,
    }
    if kind == "leave":
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            async for _ in reply.aiter_lines():
                break
    else:
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == (400 if kind == "refused" else 200), (kind, reply.text)
    return kind


async def send_all(url: str, model: str, numbers: range) -> Counter[str]:
    gate = asyncio.Semaphore(CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:

        async def gated(number: int) -> str:
            async with gate:
                return await send(client, model, number)

        return Counter(await asyncio.gather(*(gated(number) for number in numbers)))


def resources(fleet: Fleet) -> dict[str, float]:
    """Return descriptors, threads and resident bytes of each process."""
    figures: dict[str, float] = {}
    for role in ROLES:
        for number, pid in enumerate(fleet.pids(role)):
            process = psutil.Process(pid)
            figures[f"{role} {number} descriptors"] = process.num_fds()
            figures[f"{role} {number} threads"] = process.num_threads()
            figures[f"{role} {number} memory"] = process.memory_info().rss
    return figures


def remaining_growth(fleet: Fleet, before: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Wait until no process has more than before, at most LATE_S. Return what still has, each with
    its value before and now."""

    def growth() -> dict[str, tuple[float, float]]:
        now = resources(fleet)
        limits = {name: GROWTH if name.endswith("memory") else 1.0 for name in now}
        return {n: (before[n], v) for n, v in now.items() if v > before[n] * limits[n]}

    with suppress(TimeoutError):
        wait_until(lambda: not growth(), limit_s=LATE_S, pause_s=1.0)
    return growth()


def test_requests_leave_nothing_behind() -> None:
    options = ["--kv-tokens", "16384", "--chunk-size", "128", "--kv-transport", "tcp"]
    options += ["--remote-prefill-threshold", "192"]
    options += ["--queue-timeout-s", str(WAIT_S), "--request-timeout-s", str(WAIT_S)]
    with Fleet("--prefill", "1", "--decode", "1", *options) as fleet:
        model = httpx.get(f"{fleet.url}/v1/models").json()["data"][0]["id"]
        kinds = asyncio.run(send_all(fleet.url, model, range(BATCH)))
        wait_until(fleet.all_blocks_back, "blocks back")
        time.sleep(IDLE_S)
        before = resources(fleet)
        for batch in range(1, MAX_BATCHES):
            numbers = range(batch * BATCH, (batch + 1) * BATCH)
            kinds += asyncio.run(send_all(fleet.url, model, numbers))
            wait_until(fleet.all_blocks_back, "blocks back")
            growth = remaining_growth(fleet, before)
            if not growth:
                break
            before = resources(fleet)
        assert not growth, f"more after each of {MAX_BATCHES} batches, the last time {growth}"
        assert fleet.prefills("remote") > 0
    assert set(kinds) == {*KINDS}
