"""Streams of chat completions over plain sockets, each piece with the time of its arrival."""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field

PIECE = re.compile(rb'"content":"((?:[^"\\]|\\.)+)"')
FIRST_MARK = ord("!")


@dataclass
class Stream:
    """One answer: when it was asked for, and when each of its tokens came."""

    asked: float
    marks: list[int] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)

    def take(self, data: bytes) -> None:
        now = time.monotonic()
        for found in PIECE.finditer(data):
            for char in json.loads(b'"%s"' % found[1]):
                self.marks.append(ord(char) - FIRST_MARK)
                self.arrived.append(now)


async def stream(address: str, model: str, prompt: str, num_tokens: int) -> Stream:
    """Asks for so many tokens, greedily. Raises RuntimeError unless all have come."""
    host, _, port = address.partition(":")
    body = json.dumps({
        "model": model, "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num_tokens, "temperature": 0, "stream": True,
    }).encode()  # fmt: skip
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        found = Stream(time.monotonic())
        writer.write((head + "Connection: close\r\n\r\n").encode() + body)
        rest = b""
        while data := await reader.read(1 << 16):
            whole, end, rest = (rest + data).rpartition(b"\n\n")
            found.take(whole + end)
    finally:
        writer.close()
    if len(found.marks) != num_tokens:
        raise RuntimeError(f"{len(found.marks)} of {num_tokens} tokens: {data + rest!r}")
    return found


async def streams(
    address: str, model: str, count: int, num_tokens: int, prompt: str = "Go."
) -> list[Stream]:
    """So many at once."""
    return await asyncio.gather(
        *(stream(address, model, f"{n} {prompt}", num_tokens) for n in range(count))
    )
