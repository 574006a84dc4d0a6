"""Tokens written directly on arrival: the client receives the same stream as without it."""

import asyncio
import json
import re
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fakes.router import FakeRouter, saying, served
from systems.eventually import eventually

from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.responses import DirectWrite

pytestmark = pytest.mark.anyio
BOUNDS = HttpLimits(1 << 16, 1 << 20, 10.0, max_buffer_bytes=1 << 20, stall_s=30.0)
SMALL = 1 << 12  # socket buffer size
TEXT = "hello world " * 60 + "and then more"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}
PLAIN = {"prompt": "hi", "max_tokens": 400}
CASES = [
    ("chat/completions", CHAT),
    ("chat/completions", CHAT | {"n": 3, "stream_options": {"include_usage": True}}),
    ("completions", PLAIN),
    ("chat/completions", CHAT | {"stop": ["and then", "never"]}),
    ("completions", PLAIN | {"n": 2, "stream_options": {"include_usage": True}}),
]
APART = [
    ("chat/completions", CHAT | {"logprobs": True}),
    ("completions", PLAIN | {"return_token_ids": True}),
    ("completions", PLAIN | {"prompt": ["hi", "ho"]}),
    ("completions", PLAIN | {"echo": True}),
]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Count the events written directly (True) and those that could not be (False)."""
    counts: Counter[bool] = Counter()
    write = DirectWrite.write

    def counted(self: DirectWrite, event: bytes) -> bool:
        counts[done := write(self, event)] += 1
        return done

    monkeypatch.setattr(DirectWrite, "write", counted)
    return counts


def chunks(body: str) -> list[dict[str, Any]]:
    """The chunks of a stream sorted by choice, without the fields that differ between answers."""
    events = [line.removeprefix("data: ") for line in body.split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    found = [json.loads(event) for event in events[:-2]]
    for chunk in found:
        del chunk["id"], chunk["created"]
    return sorted(found, key=lambda chunk: [choice["index"] for choice in chunk["choices"]] or [99])


@pytest.mark.parametrize(
    ("directly", "path", "body"),
    [(True, *case) for case in CASES] + [(False, *case) for case in APART],
)
async def test_chunks_are_the_same(
    serve: Callable[..., Any],
    make_http: Callable[..., httpx.AsyncClient],
    written: Counter[bool],
    directly: bool,
    path: str,
    body: dict[str, Any],
) -> None:
    """Compare the chunks with those of a server without direct writes."""
    body = {"model": "tiny", "stream": True, **body}
    other = await make_http(saying(TEXT)).post(f"/v1/{path}", json=body)
    assert not written[True]
    url = await serve(saying(TEXT))
    async with httpx.AsyncClient(trust_env=False) as client:
        direct = await client.post(f"{url}/v1/{path}", json=body)
    assert chunks(direct.text) == chunks(other.text)
    assert written[True] > 100 if directly else not written[True]


def counting(number: int) -> str:
    return " ".join(map(str, range(number)))


async def answer(serve: Callable[..., Any], version: str, begins: Callable[[], Any]) -> str:
    """The text of a long streamed answer; the client reads only once `begins` holds."""
    card, blobs = served(context_len=50_000)
    router = FakeRouter(saying(counting(900)), [card], blobs)
    url = httpx.URL(await serve(router, send_buffer=SMALL, bounds=BOUNDS))
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (url.host, url.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1 << 10)
    body = json.dumps({"model": "tiny", "stream": True, **CHAT, "max_tokens": 40_000}).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await eventually(begins)
    got = await reader.read()
    writer.close()
    pieces = re.findall(rb'"content":"([^"]*)"', got)
    return b"".join(pieces).decode()


async def test_a_lagging_client_gets_everything_in_order(
    serve: Callable[..., Any], written: Counter[bool]
) -> None:
    assert await answer(serve, "1.1", lambda: written[False]) == counting(900)
    assert written[True] > 10


async def test_a_client_of_http_1_0_gets_no_direct_writes(
    serve: Callable[..., Any], written: Counter[bool]
) -> None:
    """Send tokens as ordinary events, because answers of HTTP/1.0 are not chunked."""
    assert await answer(serve, "1.0", lambda: True) == counting(900)
    assert not written[True]
    assert written[False] > 100
