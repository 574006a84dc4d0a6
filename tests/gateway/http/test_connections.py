"""Clients that disconnect, do not read, or send slowly, over real sockets.

Over 400 lines: raw connections to one server, which all tests share.
"""

import asyncio
import itertools
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest
from fakes.router import FakeRouter, finished, placed, saying, tokens
from systems.eventually import LIMIT_S, eventually

from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.serving import protocol
from pdserve.gateway.main import HttpServer, listen
from pdserve.gateway.openai import OpenAiApi
from pdserve.protos import common_pb2 as pb

HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
    "content-type: application/json; charset=utf-8\r\n"
)
pytestmark = pytest.mark.anyio
SMALL = 1 << 14  # socket buffer size, fills quickly
HI = [{"role": "user", "content": "hi"}]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def connect(make_app, make_service, anyio_backend) -> AsyncIterator[Callable[..., object]]:
    """Serve a scripted router and open a raw connection to it."""
    servers: list[tuple[HttpServer, asyncio.Task[None]]] = []
    writers: list[asyncio.StreamWriter] = []

    async def make(router: FakeRouter, **options: object) -> Connection:
        bounds = HttpLimits(1 << 16, 1 << 20, 0.5, max_buffer_bytes=1 << 16, stall_s=0.3)
        openai = OpenAiApi(make_service(router), bounds, BodyReader(bounds))
        stall_s = options.get("bounds", bounds).stall_s
        server = HttpServer(make_app(router, **options), openai, stall_s)
        listener = listen("127.0.0.1", 0)
        # accepted sockets inherit it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        task = asyncio.create_task(server.serve([listener]))
        servers.append((server, task))
        host, port = listener.getsockname()
        await eventually(lambda: server.started)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (host, port))
        reader, writer = await asyncio.open_connection(sock=client, limit=1 << 12)
        writers.append(writer)
        return reader, writer

    yield make
    for writer in writers:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    for server, task in servers:
        server.should_exit = True
        await asyncio.wait_for(task, LIMIT_S)


def post(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"{HEAD}content-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def endless(router, start):
    """Yield many tokens per event until the consumer stops."""
    yield placed(start)
    ids = router.encode("hello world ") * 40
    for position in range(0, 10**9, len(ids)):
        yield tokens(start, ids, position)
        await asyncio.sleep(0)


async def one_by_one(router, start):
    """Yield one token per event until the consumer stops."""
    yield placed(start)
    for position, id_ in enumerate(itertools.cycle(router.encode("hello world "))):
        yield tokens(start, [id_], position)
        await asyncio.sleep(0)


async def waiting(router, start):
    yield placed(start)
    await asyncio.Event().wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("play", [waiting, endless, one_by_one])
async def test_a_client_that_disconnects(connect, stream, play):
    """Set the byte and time limits so high that only the disconnect can end the request."""
    router = FakeRouter(play)
    never = 100 * LIMIT_S
    bounds = HttpLimits(1 << 16, 1 << 20, never, max_buffer_bytes=1 << 40, stall_s=never)
    reader, writer = await connect(router, bounds=bounds)
    writer.write(post({"model": "tiny", "messages": HI, "stream": stream}))
    await eventually(lambda: router.starts)
    if stream and play is not waiting:
        assert b"200 OK" in await reader.readline()
    writer.transport.abort()
    await asyncio.wait_for(router.closed.wait(), LIMIT_S)
    assert router.left == [router.starts[0].request]


async def test_a_client_that_disconnects_with_a_pipelined_request(connect):
    """Cancel the first request when it is written to, and never start the second."""
    router = FakeRouter(one_by_one)
    reader, writer = await connect(router)
    writer.write(2 * post({"model": "tiny", "messages": HI, "stream": True}))
    assert b"200 OK" in await reader.readline()
    writer.transport.abort()
    await asyncio.wait_for(router.closed.wait(), LIMIT_S)
    assert router.left == [start.request for start in router.starts]


@pytest.mark.parametrize("close", ["", "connection: close\r\n"], ids=["kept", "closing"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_half_closes_is_answered(connect, stream, close):
    go_on = asyncio.Event()

    async def play(router, start):
        yield placed(start)
        await go_on.wait()
        async for event in saying("hello")(router, start):
            yield event

    router = FakeRouter(play)
    reader, writer = await connect(router)
    request = post({"model": "tiny", "messages": HI, "stream": stream})
    writer.write(request.replace(b"host: x\r\n", f"host: x\r\n{close}".encode()))
    writer.write_eof()
    await eventually(lambda: router.starts)
    assert await reader.readuntil(b"\r\n\r\n") == protocol.INTERIM
    await asyncio.sleep(3 * protocol.LOOK_S)
    assert router.left == []
    go_on.set()
    answer = await asyncio.wait_for(reader.read(), LIMIT_S)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"hello" in answer
    assert answer.endswith(b"0\r\n\r\n" if stream else b"}")


async def test_a_client_that_half_closes_and_then_disconnects(connect):
    router = FakeRouter(waiting)
    reader, writer = await connect(router)
    writer.write(post({"model": "tiny", "messages": HI}))
    writer.write_eof()
    assert await reader.readuntil(b"\r\n\r\n") == protocol.INTERIM
    writer.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    writer.transport.abort()
    await asyncio.wait_for(router.closed.wait(), LIMIT_S)
    assert router.left == [router.starts[0].request]


@pytest.mark.parametrize("head", ["", "POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"])
async def test_an_unfinished_request_ends_with_its_connection(connect, head):
    reader, writer = await connect(FakeRouter(waiting))
    writer.write(head.encode())
    writer.write_eof()
    await asyncio.wait_for(reader.read(), LIMIT_S)


async def test_a_client_of_http_1_0_that_half_closes_has_disconnected(connect):
    """Cancel the request: a proxy half-closes when its own client has disconnected."""
    router = FakeRouter(waiting)
    _, writer = await connect(router)
    request = post({"model": "tiny", "messages": HI})
    writer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
    await eventually(lambda: router.starts)
    writer.write_eof()
    await asyncio.wait_for(router.closed.wait(), LIMIT_S)


async def test_a_client_that_disconnects_with_several_prompts(connect):
    router = FakeRouter(waiting)
    _, writer = await connect(router)
    body = {"model": "tiny", "prompt": ["a", "b", "c"]}
    writer.write(post(body).replace(b"/chat", b""))
    await eventually(lambda: len(router.starts) == 3)
    writer.transport.abort()
    await eventually(lambda: len(router.left) == 3)
    assert sorted(router.left) == sorted(start.request for start in router.starts)


async def test_a_reading_client_receives_events_that_repeat_many_logprobs(connect):
    """Each of the last four events has all logprobs, and they are sent at once."""
    bounds = HttpLimits(1 << 16, 1 << 20, 0.5, max_buffer_bytes=1 << 18, stall_s=5.0)
    reader, writer = await connect(FakeRouter(saying("hello world " * 80)), bounds=bounds)
    body = {
        "model": "tiny", "input": "hi", "stream": True, "top_logprobs": 20,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    request = post(body).replace(b"/v1/chat/completions", b"/v1/responses")
    writer.write(request.replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\n"))
    answer = await asyncio.wait_for(reader.read(), LIMIT_S)
    assert answer.endswith(b"0\r\n\r\n")
    assert b"event: response.completed" in answer
    repeated = answer[answer.index(b"event: response.output_text.done") :]
    assert len(repeated) > 4 * bounds.max_buffer_bytes


@pytest.mark.parametrize("play", [endless, one_by_one])
async def test_a_client_that_does_not_read_is_dropped_at_the_byte_cap(connect, play):
    router = FakeRouter(play)
    bounds = HttpLimits(1 << 16, 1 << 20, 0.5, max_buffer_bytes=1 << 17, stall_s=60)
    reader, writer = await connect(router, bounds=bounds)
    writer.write(post({"model": "tiny", "messages": HI, "stream": True}))
    await reader.readline()
    await asyncio.wait_for(router.closed.wait(), LIMIT_S)
    assert len(router.left) == 1
    with suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass


async def test_a_client_that_does_not_read_is_dropped_after_the_stall_time(connect):
    async def play(router, start):
        """Fill the socket's buffers, then stop within the byte cap."""
        async for event in endless(router, start):
            yield event
            if event.tokens.position > 200_000:
                break
        await asyncio.Event().wait()

    router = FakeRouter(play)
    bounds = HttpLimits(1 << 16, 1 << 20, 0.5, max_buffer_bytes=1 << 30, stall_s=0.3)
    reader, writer = await connect(router, bounds=bounds)
    writer.write(post({"model": "tiny", "messages": HI, "stream": True}))
    await reader.readline()
    await asyncio.wait_for(router.closed.wait(), LIMIT_S)
    assert len(router.left) == 1


async def test_an_unread_whole_answer_closes_the_connection(connect):
    router = FakeRouter(saying("hello world " * 40))
    bounds = HttpLimits(1 << 16, 1 << 20, 0.5, max_buffer_bytes=1 << 20, stall_s=0.3)
    reader, writer = await connect(router, bounds=bounds)
    body = {
        "model": "tiny",
        "messages": HI,
        "logprobs": True,
        "top_logprobs": 20,
        "max_tokens": 300,
    }
    writer.write(post(body))
    await reader.readline()
    async with asyncio.timeout(20):
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await asyncio.sleep(1.0)
            while piece := await reader.read(1 << 16):
                assert piece
    assert reader.at_eof() or reader.exception()


@pytest.mark.parametrize("more", ["", "connection: close\r\n"], ids=["kept", "closing"])
async def test_an_unread_plain_answer_closes_the_connection(connect, more):
    bounds = HttpLimits(1 << 16, 1 << 20, 0.5, max_buffer_bytes=1 << 20, stall_s=0.3)
    reader, writer = await connect(FakeRouter(saying("x")), bounds=bounds)
    writer.write(f"GET /openapi.json HTTP/1.1\r\nhost: x\r\n{more}\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    num_bytes = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    await asyncio.sleep(1.0)
    taken = 0
    async with asyncio.timeout(20):
        with suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                taken += len(piece)
    assert 0 < taken < num_bytes


async def test_a_slowly_read_plain_answer_is_sent_completely(connect):
    bounds = HttpLimits(1 << 16, 1 << 20, 0.5, max_buffer_bytes=1 << 20, stall_s=0.3)
    reader, writer = await connect(FakeRouter(saying("x")), bounds=bounds)
    for _ in range(2):  # the second request uses the same connection
        writer.write(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        num_bytes = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        async with asyncio.timeout(20):
            for at in range(0, num_bytes, 1 << 13):
                await reader.readexactly(min(num_bytes - at, 1 << 13))
                await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    assert not reader.at_eof(), "an idle connection must stay open"


async def test_an_unread_large_last_event_closes_the_connection(connect):
    async def play(router, start):
        yield placed(start)
        yield tokens(start, router.encode("hello world " * 40_000), 0, finish=pb.LENGTH)
        yield finished(start)

    bounds = HttpLimits(1 << 16, 1 << 20, 0.5, max_buffer_bytes=1 << 30, stall_s=0.3)
    reader, writer = await connect(FakeRouter(play), bounds=bounds)
    writer.write(post({"model": "tiny", "messages": HI, "stream": True}))
    await reader.readline()
    await asyncio.sleep(1.0)
    taken = b""
    async with asyncio.timeout(20):
        with suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                taken += piece
    assert b"hello" in taken
    assert not taken.endswith(b"0\r\n\r\n")


async def test_a_slow_reader_gets_everything(connect):
    words = "hello world " * 200

    async def play(router, start):
        ids = router.encode(words)
        for position, token in enumerate(ids):
            last = position == len(ids) - 1
            # yield to the reader, as real tokens arrive in separate messages
            await asyncio.sleep(0)
            yield tokens(start, [token], position, finish=pb.LENGTH if last else 0)
        yield finished(start)

    reader, writer = await connect(FakeRouter(play))
    writer.write(post({"model": "tiny", "messages": HI, "stream": True}))
    data = b""
    async with asyncio.timeout(20):
        while b"[DONE]" not in data:
            piece = await reader.read(1 << 13)
            assert piece, "the server closed the connection"
            data += piece
            await asyncio.sleep(0.001)
    text = ""
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            text += choice["delta"].get("content", "")
    assert text == words


async def test_a_head_that_is_too_large(connect):
    reader, writer = await connect(FakeRouter(saying("x")))
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
    writer.write(b"x-filler: " + b"y" * 100_000 + b"\r\n\r\n")
    assert b" 431 " in await reader.readline()
    body = (await reader.read()).split(b"\r\n\r\n")[1]
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("noise", [b"\x16\x03\x01\x02\x00", b"HELLO\r\n\r\n"], ids=["tls", "words"])
async def test_invalid_http(connect, noise):
    reader, writer = await connect(FakeRouter(saying("x")))
    writer.write(noise)
    head, _, body = (await asyncio.wait_for(reader.read(), LIMIT_S)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_too_many_headers(connect):
    reader, writer = await connect(FakeRouter(saying("x")))
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 200 + b"\r\n")
    assert b" 431 " in await reader.readline()


async def test_a_head_that_arrives_too_slowly(connect, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await connect(FakeRouter(saying("x")))
    writer.write(b"GET /health HTTP/1.1\r\nhost")
    assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""


async def test_one_connection_serves_many_requests(connect, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 1.0)
    reader, writer = await connect(FakeRouter(saying("x")))
    for pause in (0, 1.2, 0):  # an idle pause between requests does not count as a slow head
        await asyncio.sleep(pause)
        writer.write(post({"model": "tiny", "messages": HI}))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length))["choices"]


@pytest.mark.parametrize("head", ["POST /v1/completions", "GET /health", "GET /ready"])
@pytest.mark.parametrize("rest", [1, 1000, 5000])
async def test_an_answer_before_the_end_of_a_body_closes_the_connection(
    connect, monkeypatch, head, rest
):
    if rest == 1:  # the client then sends nothing more
        monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 1.0)
    reader, writer = await connect(FakeRouter(saying("x")), keys=("secret",))
    writer.write(f"{head} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
    assert b"\r\nconnection: close\r\n" in head
    writer.write(b"x" * rest)
    await asyncio.wait_for(reader.read(), LIMIT_S / 3)


async def test_a_large_body_does_not_hide_its_refusal(connect):
    reader, writer = await connect(FakeRouter(saying("x")), keys=("secret",))
    writer.write(f"{HEAD}content-length: {8 << 20}\r\n\r\n".encode() + b"x" * (8 << 20))
    await asyncio.wait_for(writer.drain(), LIMIT_S)
    assert b" 401 " in await asyncio.wait_for(reader.readline(), LIMIT_S)


async def test_a_refusal_after_the_body_keeps_the_connection(connect):
    reader, writer = await connect(FakeRouter(saying("x")), keys=("secret",))
    for _ in range(2):
        writer.write(post({"model": "tiny", "messages": HI}))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 401 " in head
        assert b"connection: close" not in head
        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))


@pytest.mark.parametrize("filler", [b"0\r\nx: ", b"1;"], ids=["trailer", "chunk extension"])
async def test_lines_of_a_chunked_body_are_bounded(connect, filler):
    _, writer = await connect(FakeRouter(saying("x")), keys=("secret",))
    head = f"{HEAD}transfer-encoding: chunked\r\n\r\n".encode()
    writer.write(head + filler)

    async def fill() -> None:
        for _ in range(100):
            writer.write(b"y" * (1 << 16))
            await asyncio.wait_for(writer.drain(), LIMIT_S)

    with pytest.raises(ConnectionError):
        await fill()


@pytest.mark.parametrize("keep", ["", "connection: keep-alive\r\n"])
async def test_a_stream_of_http_1_0_is_not_chunked(connect, keep):
    reader, writer = await connect(FakeRouter(saying("hello world")))
    data = json.dumps({"model": "tiny", "messages": HI, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\n{keep}"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await asyncio.wait_for(reader.read(), LIMIT_S)  # until the connection closes
    top, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in top.lower()
    assert b"connection: close" in top.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


BODY = json.dumps({"model": "tiny", "messages": HI, "max_tokens": 2})
UPGRADE = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"


@pytest.mark.parametrize("cut", [None, "upgr", "\r\n\r\n"])
async def test_an_upgrade_offer_does_not_lose_the_body(connect, cut) -> None:
    """Ignore an upgrade offer, as Java's client sends it. If the request arrives in pieces, the
    connection is closed and the body is not parsed as a request."""
    reader, writer = await connect(FakeRouter(saying("hello")))
    hidden = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    body = BODY if cut is None else hidden
    text = f"{HEAD}{UPGRADE}content-length: {len(body)}\r\n\r\n{body}"
    at = len(text) if cut is None else text.index(cut) + 2
    writer.write(text[:at].encode())
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.write(text[at:].encode())
    if cut is None:
        writer.write(hidden.encode())  # a separate request on the kept connection
    found = await asyncio.wait_for(_until_idle(reader), LIMIT_S)
    if cut is None:
        assert found.count("HTTP/1.1 200") == 2, found
        assert "hello" in found
    else:
        assert found.count("HTTP/1.1 ") == 1, found
        assert "HTTP/1.1 400" in found


async def _until_idle(reader: asyncio.StreamReader) -> str:
    """The data received until the end or until half a second without data."""
    found = b""
    with suppress(TimeoutError):
        while data := await asyncio.wait_for(reader.read(1 << 16), 0.5):
            found += data
    return found.decode()
