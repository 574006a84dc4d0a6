"""Line 4: a killed prefill worker, clients that disconnect, and 1,000 mixed requests leave no
resources behind."""

import asyncio
import json
import random
import socket
import sys
import time
from collections import Counter
from typing import Any

import httpx
import psutil
from pytest_line import run_tests
from systems.eventually import wait_until
from systems.fleet import Fleet

REQUESTS, CLIENTS, LEAVES = 1000, 16, 10
WORDS = "one two three four five six seven eight nine ten eleven twelve "
ROLES = ("gateway", "router", "prefill", "decode")
GROWTH = 1.10  # of resident memory over the second half of the requests


async def one(client: httpx.AsyncClient, model: str, number: int, seen: Counter[str]) -> None:
    """Send one request: short, long, streamed, cancelled, several choices or refused."""
    draw = random.Random(number)
    kind = draw.choice(["short", "long", "stream", "leave", "choices", "refused", "prefix"])
    size = {"long": draw.randrange(40, 120), "prefix": 50}.get(kind, draw.randrange(1, 12))
    start = "" if kind == "prefix" else f"{number} "
    body: dict[str, Any] = {
        "model": model, "prompt": start + WORDS * size, "max_tokens": draw.randrange(1, 12),
        "temperature": draw.choice([0, 1]), "seed": number,
    }  # fmt: skip
    if kind == "choices":
        body["n"] = 3
    if kind == "refused":
        body["top_p"] = 7
    if kind in ("stream", "leave"):
        body["stream"] = True
    if kind == "leave":
        body["max_tokens"] = 400
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            async for _ in reply.aiter_lines():
                break
    else:
        reply = await client.post("/v1/completions", json=body)
        wanted = 400 if kind == "refused" else 200
        assert reply.status_code == wanted, (kind, reply.status_code, reply.text)
    seen[kind] += 1


async def mixed(url: str, model: str, numbers: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    gate = asyncio.Semaphore(CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def gated(number: int) -> None:
            async with gate:
                await one(client, model, number, seen)

        await asyncio.gather(*(gated(number) for number in numbers))
    return seen


def held(fleet: Fleet) -> dict[str, dict[str, float]]:
    """Descriptors, threads and resident MiB of every process."""
    figures = {}
    for role in ROLES:
        for i, pid in enumerate(fleet.pids(role)):
            process = psutil.Process(pid)
            figures[f"{role} {i}"] = {
                "fds": process.num_fds(),
                "threads": process.num_threads(),
                "rss_mib": round(process.memory_info().rss / 2**20, 1),
            }
    return figures


def soak(fleet: Fleet, model: str) -> dict[str, Any]:
    half = REQUESTS // 2
    seen = asyncio.run(mixed(fleet.url, model, range(half)))
    wait_until(fleet.all_blocks_back, "blocks back after the first half", limit_s=10)
    time.sleep(6)  # idle connections are closed
    before = held(fleet)
    seen += asyncio.run(mixed(fleet.url, model, range(half, REQUESTS)))
    wait_until(fleet.all_blocks_back, "blocks back after the second half", limit_s=10)
    time.sleep(6)
    after = held(fleet)
    grown = [
        f"{name} {what}"
        for name, row in after.items()
        for what, value in row.items()
        if value > before[name][what] * (GROWTH if what == "rss_mib" else 1)
    ]
    return {
        "ok": not grown and sum(seen.values()) == REQUESTS,
        "requests": dict(seen),
        "remote": fleet.prefills("remote"),
        "half": before,
        "end": after,
        "grown": grown,
        "blocks": fleet.blocks(),
    }


def leave(fleet: Fleet, model: str, number: int, wait_s: float) -> float:
    """Seconds from a client's disconnect to the release of its last block, on both sides."""
    host, port = fleet.url.removeprefix("http://").split(":")
    body = {"model": model, "prompt": f"Left {number}: " + WORDS * 150, "max_tokens": 300,
            "stream": True}  # fmt: skip
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"

    def holding() -> bool:
        return sum(b["used"] + b["reserved"] for b in fleet.blocks().values()) > 0

    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + data)
        wait_until(holding, "blocks held for the client", limit_s=30)
        time.sleep(wait_s)
        assert holding(), "it was over before the client left"
        left = time.monotonic()
    wait_until(fleet.all_blocks_back, "blocks back", limit_s=30)
    return time.monotonic() - left


def chunk_s(fleet: Fleet) -> float:
    """The longest step that a cancel may have to wait for: one chunk with a decode row."""
    rates = [w for w in fleet.fleet_view().workers if w.load.prefill_tokens_s]
    return max(128 / w.load.prefill_tokens_s for w in rates)


def main() -> None:
    killed = run_tests("tests/system/test_faults.py")
    options = ["--kv-tokens", "16384", "--chunk-size", "128", "--kv-transport", "tcp"]
    with Fleet("--prefill", "1", "--decode", "1", *options) as fleet:
        model = httpx.get(f"{fleet.url}/v1/models").json()["data"][0]["id"]
        # Half of them during the prefill and transfer, half while decode streams.
        waits = [0.3 if i % 2 else 4.0 for i in range(LEAVES)]
        seconds = [round(leave(fleet, model, i, wait), 3) for i, wait in enumerate(waits)]
        step = chunk_s(fleet)
        # One step and 100 ms: the load report that shows it (50 ms) and this poll (50 ms).
        bound = step + 0.1 + 0.1
        soaked = soak(fleet, model)
    figures = {
        "ok": killed["ok"] and soaked["ok"] and max(seconds) <= bound,
        "kill_tests": killed,
        "client_left_s": seconds,
        "step_s": round(step, 3),
        "bound_s": round(bound, 3),
        "soak": soaked,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(main())
