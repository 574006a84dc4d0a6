"""Sends a benchmark's requests: at random times regardless of the server (open loop), or with a
constant number in flight (closed loop)."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pdserve.services.cli.async_client import AsyncApi
from pdserve.services.cli.bench.measure import Sample
from pdserve.services.cli.http_client import ApiError

OnSample = Callable[[Sample], None]
Bodies = Iterator[bytes]


async def open_loop(
    api: AsyncApi, path: str, bodies: Bodies, rate: float, seed: int, on_sample: OnSample
) -> None:
    """Send requests as a Poisson process of `rate` requests/s."""
    rng = random.Random(seed)
    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for body in bodies:
            await asyncio.sleep(due - time.perf_counter())
            group.create_task(send_request(api, path, body, on_sample))
            due += rng.expovariate(rate)


async def closed_loop(
    api: AsyncApi, path: str, bodies: Bodies, concurrency: int, on_sample: OnSample
) -> None:
    """Run `concurrency` clients, each of which sends its next request after a response."""

    async def client() -> None:
        for body in bodies:
            await send_request(api, path, body, on_sample)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())


async def send_request(api: AsyncApi, path: str, body: bytes, on_sample: OnSample) -> None:
    """Send one streamed request; errors are recorded in its sample."""
    events = _Events()
    started = time.perf_counter()
    error = ""
    try:
        response = (await api.post(path, body, events.take)).check()
        if not response.body and not events.arrivals:
            error = "the response has no text"
    except ApiError as api_error:
        error = str(api_error)
    on_sample(
        Sample(
            started,
            tuple(events.arrivals),
            time.perf_counter(),
            events.usage.get("prompt_tokens", 0),
            events.usage.get("completion_tokens", 0) or len(events.arrivals),
            error or events.error,
        )
    )


class _Events:
    """Records the arrival time of each text of a stream."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.usage: Mapping[str, Any] = {}
        self.error = ""
        self._rest = b""

    def take(self, piece: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._event(json.loads(line[6:]), now)

    def _event(self, event: dict[str, Any], now: float) -> None:
        if failure := event.get("error"):
            self.error = str(failure.get("message", failure))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice
            if delta.get("text") or delta.get("content") or delta.get("reasoning_content"):
                self.arrivals.append(now)
                return
