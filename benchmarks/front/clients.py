"""Streams of chat completions, each piece with the time of its arrival.

Pieces are parsed after their stream has ended: with many clients in one process, the time spent on
one would count as latency of the others.
"""

import asyncio
import json
import re
import time
from contextlib import closing
from dataclasses import dataclass, field

from pdserve.cli.async_client import AsyncApi
from pdserve.cli.options import ClientSettings

PIECE = re.compile(rb'"content":"((?:[^"\\]|\\.)+)"')
FIRST_MARK = ord("!")


@dataclass
class Stream:
    """One answer: when it was requested, and when each of its tokens arrived."""

    sent_at: float
    marks: list[int] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)

    def take(self, data: bytes, now: float) -> None:
        for found in PIECE.finditer(data):
            for char in json.loads(b'"%s"' % found[1]):
                self.marks.append(ord(char) - FIRST_MARK)
                self.arrived.append(now)


async def stream(api: AsyncApi, model: str, prompt: str, num_tokens: int) -> Stream:
    """Request this many greedy tokens. Raises RuntimeError unless all arrive, ApiError if the
    server refuses."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    body |= {"max_tokens": num_tokens, "temperature": 0, "stream": True}
    pieces: list[tuple[float, bytes]] = []
    found = Stream(time.monotonic())

    def on_body(piece: bytes, _: float) -> None:
        pieces.append((time.monotonic(), piece))

    (await api.post("/v1/chat/completions", body, on_body)).check()
    rest = b""
    for now, data in pieces:
        whole, end, rest = (rest + data).rpartition(b"\n\n")
        found.take(whole + end, now)
    if len(found.marks) != num_tokens:
        raise RuntimeError(f"{len(found.marks)} of {num_tokens} tokens: {rest!r}")
    return found


async def streams(
    address: str, model: str, count: int, num_tokens: int, prompt: str = "Go."
) -> list[Stream]:
    """Run this many streams at once."""
    with closing(AsyncApi(ClientSettings(url=f"http://{address}"))) as api:
        return await asyncio.gather(
            *(stream(api, model, f"{n} {prompt}", num_tokens) for n in range(count))
        )
