"""Sends requests at their planned times, or with a constant number in flight, and records the
arrival of each event.

Requests are built before the start, and there is no garbage collection meanwhile: the client shares
the cores with the system that it measures, and its processor time is part of the result.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from interference.figures import Answer

from pdserve.cli.async_client import AsyncApi
from pdserve.cli.load import Sample, send_request
from pdserve.cli.options import ClientSettings


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A prepared request."""

    kind: str
    at_s: float
    body: bytes


def request_body(model: str, ids: Sequence[int], new: int) -> bytes:
    """A streaming greedy completion of exactly `new` tokens: end tokens are masked."""
    body = {"model": model, "prompt": list(ids), "max_tokens": new, "min_tokens": new}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body).encode()


async def _send(api: AsyncApi, request: PlannedRequest, start: float) -> Answer:
    """Raises RuntimeError if the stream breaks or has no usage."""
    samples: list[Sample] = []
    await send_request(api, "/v1/completions", request.body, samples.append)
    (sample,) = samples
    if sample.error or not sample.prompt_tokens:
        raise RuntimeError(sample.error or "the answer has no usage")
    return Answer(
        request.kind,
        request.at_s,
        sample.started - start,
        tuple(at - start for at in sample.arrivals),
        sample.prompt_tokens,
        sample.output_tokens,
    )


async def open_loop(url: str, requests: Sequence[PlannedRequest]) -> list[Answer]:
    """Send every request at its time; a failed one is reported and has no Answer."""
    api = AsyncApi(ClientSettings(url=url))
    answers: list[Answer] = []

    async def send(request: PlannedRequest, start: float) -> None:
        try:
            answers.append(await _send(api, request, start))
        except RuntimeError as error:
            text = f"a {request.kind} request of {request.at_s:.1f} s failed: {error}"
            print(text, file=sys.stderr, flush=True)

    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for request in requests:
                await asyncio.sleep(start + request.at_s - time.perf_counter())
                group.create_task(send(request, start))
    finally:
        gc.enable()
        api.close()
    return answers


async def closed_loop(
    url: str,
    make: Callable[[int], PlannedRequest],
    workers: int,
    until: Callable[[int, float], bool],
) -> list[Answer]:
    """`workers` that each send the next request, `make(number)`, when their last one has ended;
    none is started once until(number started, seconds) holds."""
    api = AsyncApi(ClientSettings(url=url))
    answers: list[Answer] = []
    num_started = 0
    start = time.perf_counter()

    async def work() -> None:
        nonlocal num_started
        while not until(num_started, time.perf_counter() - start):
            num_started += 1
            answers.append(await _send(api, make(num_started - 1), start))

    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work())
    api.close()
    return answers
