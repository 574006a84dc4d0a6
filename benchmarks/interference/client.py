"""An open-loop client: sends each request at its time and records the arrival of each event.

Raw HTTP/1.1 over asyncio protocols, requests built before the start, answers parsed only when
complete, no garbage collection meanwhile: the client shares the cores with the system that it
measures, and its processor time is part of the result.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

END = b"data: [DONE]\n\n"
EVENT = b"data: "


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole stream; seconds since the start of the run."""

    kind: str
    planned_s: float
    sent_s: float
    events_s: tuple[float, ...]  # when each event with text arrived
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A prepared request."""

    kind: str
    at_s: float
    data: bytes


def request_bytes(host: str, model: str, ids: Sequence[int], new: int) -> bytes:
    """A streaming greedy completion of exactly `new` tokens: end tokens are masked."""
    body = json.dumps(
        {
            "model": model,
            "prompt": list(ids),
            "max_tokens": new,
            "min_tokens": new,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def read_stream(pieces: Sequence[tuple[float, bytes]]) -> tuple[tuple[float, ...], dict[str, int]]:
    """Arrival times of the events with text, and the usage; raises RuntimeError if the stream is
    not complete."""
    whole = b"".join(data for _, data in pieces)
    if not whole.startswith(b"HTTP/1.1 200") or END not in whole:
        raise RuntimeError(f"not a whole stream: {whole[:500]!r}")
    times: list[float] = []
    usage: dict[str, int] | None = None
    piece, reached = -1, 0  # the piece that holds the byte before `reached`
    at = whole.find(EVENT)
    while at >= 0 and not whole.startswith(END, at):
        end = whole.index(b"\n\n", at) + 2
        while reached < end:
            piece += 1
            reached += len(pieces[piece][1])
        event = json.loads(whole[at + len(EVENT) : end])
        if event["choices"]:
            times.append(pieces[piece][0])
        usage = event.get("usage") or usage
        at = whole.find(EVENT, end)
    if usage is None or not times:
        raise RuntimeError(f"no usage in the answer: {whole[:500]!r}")
    return tuple(times), usage


class _Stream(asyncio.Protocol):
    """One request on a separate connection."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.sent_s = 0.0
        self.pieces: list[tuple[float, bytes]] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._data)
        self.sent_s = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def _ask(host: str, port: int, asked: Asked, start: float) -> Answer:
    loop = asyncio.get_running_loop()
    transport, stream = await loop.create_connection(lambda: _Stream(asked.data), host, port)
    try:
        await stream.over
    finally:
        transport.close()
    times, usage = read_stream(stream.pieces)
    return Answer(
        asked.kind,
        asked.at_s,
        stream.sent_s - start,
        tuple(at - start for at in times),
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


async def open_loop(url: str, asked: Sequence[Asked]) -> list[Answer]:
    """Send every request at its time, whatever the outcome of others; a failed one is reported and
    has no Answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    answers: list[Answer] = []

    async def one(request: Asked, start: float) -> None:
        try:
            answers.append(await _ask(host, int(port), request, start))
        except (OSError, RuntimeError) as error:
            text = f"a {request.kind} request of {request.at_s:.1f} s failed: {error}"
            print(text, file=sys.stderr, flush=True)

    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for request in asked:
                await asyncio.sleep(start + request.at_s - time.perf_counter())
                group.create_task(one(request, start))
    finally:
        gc.enable()
    return answers


async def closed_loop(
    url: str, ready: Callable[[int], Asked], workers: int, until: Callable[[int, float], bool]
) -> list[Answer]:
    """`workers` that each send the next request, `ready(number)`, when their last one has ended;
    none is started once until(number started, seconds) holds."""
    host, _, port = url.removeprefix("http://").partition(":")
    answers: list[Answer] = []
    begun = 0
    start = time.perf_counter()

    async def work() -> None:
        nonlocal begun
        while not until(begun, time.perf_counter() - start):
            begun += 1
            answers.append(await _ask(host, int(port), ready(begun - 1), start))

    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work())
    return answers
