"""The client for many concurrent requests: kept connections, broken ones, and invalid servers."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pdserve.cli.async_client import AsyncApi
from pdserve.cli.http_client import ApiError
from pdserve.cli.options import ClientSettings

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def with_server(serve: Serve, use: Callable[[AsyncApi], Awaitable[None]]) -> None:
    async def run() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve(reader, writer)
            writer.close()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            api = AsyncApi(ClientSettings(url=f"http://127.0.0.1:{port}/base/", api_key=("k",)), 30)
            try:
                await use(api)
            finally:
                api.close()

    asyncio.run(run())


async def request(reader: asyncio.StreamReader) -> str:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.partition("Content-Length: ")[2].split()[0])
    return head + (await reader.readexactly(length)).decode()


def test_a_connection_is_reused_until_the_server_closes_it() -> None:
    connections: list[list[str]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append([])
        for _ in range(2):
            connections[-1].append(await request(reader))
            writer.write(OK)

    async def use(api: AsyncApi) -> None:
        for _ in range(4):
            assert (await api.post("/x", {"a": 1})).check().json == {}
            await asyncio.sleep(0)

    with_server(serve, use)
    assert sum(map(len, connections)) == 4
    assert len(connections) == 2
    assert connections[0][0].startswith("POST /base/x HTTP/1.1\r\n")
    assert "Authorization: Bearer k\r\n" in connections[0][0]
    assert connections[0][0].endswith('{"a": 1}')


def test_chunks_come_with_their_times() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in (b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"):
            writer.write(piece)
            await writer.drain()

    pieces: list[tuple[bytes, float]] = []

    async def use(api: AsyncApi) -> None:
        answer = await api.post("/x", b"{}", lambda piece, now: pieces.append((piece, now)))
        assert (answer.status, answer.body) == (200, b"")

    with_server(serve, use)
    assert b"".join(piece for piece, _ in pieces) == b"onetwo"
    assert [now for _, now in pieces] == sorted(now for _, now in pieces)


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (b"", "ended early"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "ended early"),
        (b"SSH-2.0-OpenSSH\r\n", "does not respond with HTTP"),
    ],
)
def test_an_invalid_answer_is_an_error(answer: bytes, part: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(answer)

    async def use(api: AsyncApi) -> None:
        with pytest.raises(ApiError, match=part):
            await api.post("/x", {})

    with_server(serve, use)


def test_an_answer_may_end_with_its_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n[1]")

    async def use(api: AsyncApi) -> None:
        assert (await api.post("/x", {})).json == [1]

    with_server(serve, use)


def test_an_error_of_the_server_carries_its_message() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        body = b'{"error": {"message": "busy", "code": "overloaded"}}'
        head = f"HTTP/1.1 429 No\r\nRetry-After: 3\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    async def use(api: AsyncApi) -> None:
        answer = await api.post(
            "/x", {}, lambda piece, now: pytest.fail("an error was returned as text")
        )
        assert answer.retry_after_s == 3
        with pytest.raises(ApiError, match="busy") as caught:
            answer.check()
        assert (caught.value.status, caught.value.code) == (429, "overloaded")

    with_server(serve, use)
