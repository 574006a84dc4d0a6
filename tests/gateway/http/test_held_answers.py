"""Answers buffered for slow clients: the common limit, and which answer is dropped first."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress

import pytest
from starlette.types import Receive, Scope, Send
from systems.eventually import LIMIT_S, eventually

from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import HttpLimits, JsonPieces, json_event
from pdserve.gateway.http.responses import HELD, EventStream, HeldResponse, HeldResponses, Reply
from pdserve.gateway.http.serving import HttpServer
from pdserve.gateway.main import listen
from pdserve.services.common.tenants import Tenant

pytestmark = pytest.mark.anyio
SMALL = 1 << 14  # socket buffer size
NUM_BYTES = 1 << 20
LIMITS = HttpLimits(1 << 16, 1 << 16, 5.0, max_buffer_bytes=1 << 16, stall_s=60.0)
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Holder:
    """Answers of several keys held under a limit of 100 bytes."""

    def __init__(self) -> None:
        self.held = HeldResponses(100)
        self.at_end = ExitStack()

    def add(self, owner: bytes, num_bytes: int) -> HeldResponse:
        answer = self.at_end.enter_context(self.held.answer(owner))
        self.held.hold(answer, num_bytes)
        return answer


def lost(*answers: HeldResponse) -> list[bool]:
    return [answer.dropped.done() for answer in answers]


async def test_the_key_that_holds_most_loses_its_oldest_answer():
    holder = Holder()
    first, slow, slower = holder.add(b"a", 10), holder.add(b"b", 20), holder.add(b"b", 30)
    large = holder.add(b"a", 41)
    assert lost(first, slow, slower, large) == [False, True, False, False]
    assert holder.held.total == 81
    holder.held.release(slow, 20)
    assert holder.held.total == 81, "a dropped answer must not be released twice"
    huge = holder.add(b"c", 500)
    assert lost(first, slower, large, huge) == [True, True, True, False], (
        "an answer above the limit must still be sent"
    )
    holder.held.hold(huge, 1)
    assert lost(huge) == [False]
    holder.at_end.close()
    assert holder.held.total == 0


async def test_sent_bytes_make_room():
    holder = Holder()
    first, second = holder.add(b"a", 60), holder.add(b"a", 40)
    holder.held.release(first, 50)
    holder.add(b"a", 50)
    assert lost(first, second) == [False, False]
    holder.at_end.close()


def text() -> JsonPieces:
    return JsonPieces((b"[", bytearray(b"1," * (NUM_BYTES // 2)), b"1]"))


async def stream(texts: list[JsonPieces]) -> AsyncIterator[bytes | JsonPieces]:
    for one in texts:
        yield json_event(b"data: ", one)
        yield b"data: short\n\n"


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer key `path[1]` with a text: whole, as two events, or the same text in four events."""
    key = scope["path"][1].encode()
    scope["state"] = {"caller": Caller("r", tenant=Tenant("", key, b""))}
    if scope["path"].endswith("/whole"):
        await Reply(asyncio.sleep(0, text()), None)(scope, receive, send)  # type: ignore[arg-type]
        return
    texts = [text()] * 4 if scope["path"].endswith("/shared") else [text(), text()]
    events = EventStream(stream(texts), None, LIMITS)  # type: ignore[arg-type]
    await events(scope, receive, send)


@pytest.fixture
async def ask(anyio_backend: str) -> AsyncIterator[Callable[..., object]]:
    """Request a path on a separate connection; all answers together may hold four texts."""
    held: list[HeldResponses] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        held[:] = [scope["extensions"][HELD]]
        await answer(scope, receive, send)

    server = HttpServer(app, None, 60.0, max_answers_bytes=4 * NUM_BYTES + 100)  # type: ignore[arg-type]
    listener = listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    task = asyncio.create_task(server.serve([listener]))
    await eventually(lambda: server.started)
    writers = []

    async def get(path: str) -> tuple[Connection, HeldResponses]:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
        reader, writer = await asyncio.open_connection(sock=client, limit=1 << 12)
        writers.append(writer)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        return (reader, writer), held[0]

    yield get
    for writer in writers:
        writer.transport.abort()
    server.should_exit = True
    await asyncio.wait_for(task, LIMIT_S)


async def taken(connection: Connection) -> int:
    """The number of bytes received until the end."""
    count = 0
    with suppress(ConnectionError):
        while piece := await asyncio.wait_for(connection[0].read(1 << 16), LIMIT_S):
            count += len(piece)
    return count


@pytest.mark.parametrize("kind", ["whole", "stream"])
async def test_clients_that_do_not_read_do_not_fill_the_memory(ask, kind):
    num_bytes, count = (2 * NUM_BYTES, 2) if kind == "stream" else (NUM_BYTES, 4)
    slow = [(await ask(f"/a/{kind}"))[0] for _ in range(count)]
    other, held = await ask(f"/b/{kind}")
    assert await taken(other) >= num_bytes
    assert await taken(slow[0]) < num_bytes, (
        "the oldest answer of the key that holds most must be dropped"
    )
    for connection in slow[1:]:
        assert await taken(connection) >= num_bytes
    await eventually(lambda: held.total == 0)


async def test_data_shared_by_events_of_a_stream_is_counted_once(ask):
    """Count shared data once, such as the logprobs that the last four events of /v1/responses
    repeat."""
    clients = [(await ask("/a/shared"))[0] for _ in range(3)]
    last, held = await ask("/a/shared")
    assert 4 * NUM_BYTES < held.total < 4 * NUM_BYTES + 100
    for connection in (*clients, last):
        assert await taken(connection) >= 4 * NUM_BYTES
    await eventually(lambda: held.total == 0)


async def test_a_short_answer_is_not_held(ask):
    held = HeldResponses(0)
    sent: list[bytes] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message.get("body", b""))  # type: ignore[arg-type]

    async def receive() -> None:
        await asyncio.Event().wait()

    scope = {"type": "http", "extensions": {HELD: held}}
    await Reply(asyncio.sleep(0, {}), None)(scope, receive, send)  # type: ignore[arg-type]
    assert b"".join(sent) == b"{}"
