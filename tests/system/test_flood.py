"""Two hundred concurrent requests to a system that holds a few: each is answered or refused."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from builders.tiny_models import write_tiny
from systems.eventually import wait_until
from systems.fleet import Fleet

MANY = 200
QUEUE_S = 0.5  # no machine can answer the whole queue in this time
GROWTH_BYTES = 100 << 20  # limit per process: code that is loaded late, and a bounded queue
OPTIONS = (
    "--weights", "float32", "--block-size", "32", "--kv-tokens", "1024", "--max-running", "2",
    "--max-waiting", "4", "--max-queued", "20", "--max-unanswered", "48",
    "--queue-timeout-s", str(QUEUE_S), "--remote-prefill-threshold", "64",
    "--log-level", "debug",  # the router's line of each request
)  # fmt: skip


def ids(length: int, seed: int) -> list[int]:
    return [(17 * i + 31 * seed + 5) % 256 for i in range(length)]


def one(url: str) -> Any:
    """Return the answer to a single request without other load."""
    body = {"model": "tiny", "prompt": ids(120, 999), "temperature": 0, "max_tokens": 8}
    reply = httpx.post(f"{url}/v1/completions", timeout=60, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


async def ask(client: httpx.AsyncClient, number: int) -> tuple[httpx.Response, float]:
    body: dict[str, Any] = {
        "model": "tiny", "prompt": ids(30 if number % 3 else 120, number), "temperature": 0,
        "max_tokens": 150, "ignore_eos": True,
    }  # fmt: skip
    began = time.monotonic()
    reply = await client.post("/v1/completions", json=body)
    return reply, time.monotonic() - began


async def flood(url: str) -> list[tuple[httpx.Response, float]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(ask(client, number) for number in range(MANY)))


def memory(fleet: Fleet) -> dict[int, int]:
    children = psutil.Process(fleet.process.pid).children(recursive=True)
    return {child.pid: child.memory_info().rss for child in children}


@pytest.mark.extended
def test_a_flood_is_answered_or_refused_in_bounded_time(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny", "llama")
    with Fleet("--model", str(model), *OPTIONS) as fleet:
        first = one(fleet.url)
        before = memory(fleet)
        answers = asyncio.run(flood(fleet.url))
        after = memory(fleet)
        wait_until(fleet.all_blocks_back, "blocks back")
        assert one(fleet.url) == first
    assert fleet.exit_code == 0
    why: Counter[str] = Counter()
    for reply, seconds in answers:
        if reply.status_code == 200:
            assert reply.json()["usage"]["completion_tokens"] == 150
            why["answered"] += 1
            continue
        error = reply.json()["error"]
        assert reply.status_code in (429, 503), reply.text
        assert int(reply.headers["retry-after"]) >= 1
        if reply.status_code == 429:
            assert error["code"] == "rate_limit_exceeded"
        assert error["type"]
        assert error["message"]
        assert seconds < 60, "a refusal took as long as an answer may take"
        why[f"{reply.status_code} {error['message']}"] += 1
    print(why)
    assert why["answered"] >= 2
    refused = why["429 too many requests are waiting"]
    by_router = fleet.final_log.count("failed (too many requests are waiting)")
    assert 0 < by_router < refused, (by_router, why)
    assert sum(why.values()) == MANY
    assert len([w for w in why if w.startswith("503")]) >= 1, f"no queued request timed out: {why}"
    grown = {pid: after[pid] - before[pid] for pid in before}
    assert max(grown.values()) < GROWTH_BYTES, grown
