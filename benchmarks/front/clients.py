"""Streams of chat completions over plain sockets, each piece with the time of its arrival.

Pieces are parsed after their stream has ended: with many clients in one process, the time spent on
one would count as latency of the others.
"""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field

PIECE = re.compile(rb'"content":"((?:[^"\\]|\\.)+)"')
FIRST_MARK = ord("!")


@dataclass
class Stream:
    """One answer: when it was requested, and when each of its tokens arrived."""

    asked: float
    marks: list[int] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)

    def take(self, data: bytes, now: float) -> None:
        for found in PIECE.finditer(data):
            for char in json.loads(b'"%s"' % found[1]):
                self.marks.append(ord(char) - FIRST_MARK)
                self.arrived.append(now)


class _Client(asyncio.Protocol):
    """Record the received data with arrival times."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


async def stream(address: str, model: str, prompt: str, num_tokens: int) -> Stream:
    """Request this many greedy tokens. Raises RuntimeError unless all arrive."""
    host, _, port = address.partition(":")
    body = json.dumps({
        "model": model, "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num_tokens, "temperature": 0, "stream": True,
    }).encode()  # fmt: skip
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(_Client, host, int(port))
    found = Stream(time.monotonic())
    transport.write((head + "Connection: close\r\n\r\n").encode() + body)
    await client.ended
    rest = b""
    for now, data in client.pieces:
        whole, end, rest = (rest + data).rpartition(b"\n\n")
        found.take(whole + end, now)
    if len(found.marks) != num_tokens:
        raise RuntimeError(f"{len(found.marks)} of {num_tokens} tokens: {rest!r}")
    return found


async def streams(
    address: str, model: str, count: int, num_tokens: int, prompt: str = "Go."
) -> list[Stream]:
    """Run this many streams at once."""
    return await asyncio.gather(
        *(stream(address, model, f"{n} {prompt}", num_tokens) for n in range(count))
    )
