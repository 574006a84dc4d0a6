"""A thousand mixed requests leave no descriptor, thread, block or memory behind in any process."""

import asyncio
import random
import time
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest
from systems.eventually import wait_until
from systems.fleet import Fleet

pytestmark = [pytest.mark.extended, pytest.mark.timeout(3600)]

REQUESTS, CLIENTS = 1000, 16
WORDS = "one two three four five six seven eight nine ten eleven twelve "
KINDS = ("short", "long", "stream", "leave", "choices", "refused", "prefix")
ROLES = ("gateway", "router", "prefill", "decode")
GROWTH = 1.10  # of resident memory over the second half of the requests
IDLE_S = 6  # after it, idle connections are closed
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


def test_requests_leave_nothing_behind() -> None:
    options = ["--kv-tokens", "16384", "--chunk-size", "128", "--kv-transport", "tcp"]
    options += ["--remote-prefill-threshold", "192"]
    options += ["--queue-timeout-s", str(WAIT_S), "--request-timeout-s", str(WAIT_S)]
    with Fleet("--prefill", "1", "--decode", "1", *options) as fleet:
        model = httpx.get(f"{fleet.url}/v1/models").json()["data"][0]["id"]
        kinds = asyncio.run(send_all(fleet.url, model, range(REQUESTS // 2)))
        wait_until(fleet.all_blocks_back, "blocks back")
        time.sleep(IDLE_S)
        before = resources(fleet)
        limit = {n: v * GROWTH if n.endswith("memory") else v for n, v in before.items()}
        kinds += asyncio.run(send_all(fleet.url, model, range(REQUESTS // 2, REQUESTS)))
        wait_until(fleet.all_blocks_back, "blocks back")

        def leaks() -> dict[str, float]:
            return {name: v for name, v in resources(fleet).items() if v > limit[name]}

        # A busy machine closes idle connections late.
        wait_until(lambda: not leaks(), leaks, pause_s=1.0)
        assert fleet.prefills("remote") > 0
    assert set(kinds) == {*KINDS}
