"""Messages of a tokenizer worker are not trusted: the files of a model may have taken it over."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from systems.eventually import LIMIT_S, eventually

from pdserve.services.common.errors import ServiceError
from pdserve.text import Structure, TextError
from pdserve.text.workers.connections import MessageStream
from pdserve.text.workers.messages import MAX_BYTES, MAX_HEAD_BYTES, WorkerMessage, pack
from pdserve.text.workers.pool import TokenizerWorkers

pytestmark = pytest.mark.anyio

MAX_LEN = 10
IDS = struct.pack("<3I", 5, 6, 7)
ANSWER = WorkerMessage({"lengths": [3]}, [IDS])


class ScriptedHost:
    """A ForkServer whose process, and its workers, are played by the test."""

    def __init__(self, stream: MessageStream, control: socket.socket) -> None:
        self.stream = stream
        self.control = control
        self.children: list[socket.socket] = []
        self.killed = False

    def fork(self) -> socket.socket:
        near, far = socket.socketpair()
        far.setblocking(False)
        self.children.append(far)
        self.control.sendall(pack(WorkerMessage({"forked": len(self.children)})))
        return near

    def kill(self) -> None:
        self.killed = True

    async def close(self) -> None:
        self.stream.close()


@asynccontextmanager
async def scripted_host() -> AsyncIterator[ScriptedHost]:
    near, far = socket.socketpair()
    host = ScriptedHost(await MessageStream.over(near), far)
    try:
        yield host
    finally:
        for sock in (far, *host.children):
            sock.close()


@asynccontextmanager
async def tokenizer_workers(host: ScriptedHost) -> AsyncIterator[TokenizerWorkers]:
    made = TokenizerWorkers(host, 1, LIMIT_S, LIMIT_S, lambda owner, seconds: None)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture(autouse=True)
def _no_news_of_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.text.workers.connections.ENDED_S", 0.01)


@pytest.fixture
async def host(anyio_backend: str) -> AsyncIterator[ScriptedHost]:
    async with scripted_host() as host:
        yield host


@pytest.fixture
async def workers(host: ScriptedHost) -> AsyncIterator[TokenizerWorkers]:
    async with tokenizer_workers(host) as workers:
        yield workers


def raw(head: Any, behind: bytes = b"") -> bytes:
    data = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<I", len(data)) + data + behind


async def prompt(workers: TokenizerWorkers, host: ScriptedHost, answer: bytes) -> list[int]:
    """The ids of a prompt that a new child answers with these bytes."""
    before = len(host.children)
    pending = asyncio.create_task(
        workers.text_ids(b"", "x", add_special_tokens=False, max_len=MAX_LEN)
    )
    await eventually(lambda: len(host.children) == before + 1)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LIMIT_S):
        assert await loop.sock_recv(host.children[-1], 1 << 16)  # ensures that the request was sent
        await loop.sock_sendall(host.children[-1], answer)
    return await pending


NO_ANSWERS = [
    pack(WorkerMessage({})),
    pack(WorkerMessage({"lengths": [1]}, [b"12345"])),
    pack(WorkerMessage({"lengths": [3]}, [IDS, IDS])),
    pack(WorkerMessage({"lengths": [MAX_LEN + 1]}, [bytes(4 * MAX_LEN + 4)])),
    pack(WorkerMessage({}, [IDS])),
    pack(WorkerMessage({"lengths": [1, 2]}, [IDS])),
    pack(WorkerMessage({"lengths": [2]}, [IDS])),
    pack(WorkerMessage({"lengths": []}, [b""])),
    pack(WorkerMessage({"lengths": [3.0]}, [IDS])),
    pack(WorkerMessage({"lengths": 3}, [IDS])),
    pack(WorkerMessage({"error": 5})),
    pack(WorkerMessage({"error": "x", "param": []})),
    raw([]),
    raw({}),
    raw(b"not JSON"),
    raw(b"\xff\xfe"),
    raw(b"[" * 100_000),
    raw({"sizes": {}}),
    raw({"sizes": [-1]}),
    raw({"sizes": [1_000_000, -1_000_000] * 8}),
    raw({"sizes": [True]}),
    raw({"sizes": [0] * 17}),
    raw({"sizes": [MAX_BYTES + 1]}),
    struct.pack("<I", MAX_HEAD_BYTES + 1),
]


async def test_an_invalid_answer(subtests: pytest.Subtests) -> None:
    """Fail one prompt, and end the child."""
    for answer in NO_ANSWERS:
        with subtests.test(answer=answer):
            async with scripted_host() as host, tokenizer_workers(host) as workers:
                with pytest.raises((ServiceError, TextError)) as caught:
                    await prompt(workers, host, answer)
                assert len(str(caught.value)) < 500
                assert workers.alive
                assert await prompt(workers, host, pack(ANSWER)) == [5, 6, 7]


async def test_a_long_error_is_cut(workers: TokenizerWorkers, host: ScriptedHost) -> None:
    with pytest.raises(TextError) as caught:
        await prompt(workers, host, pack(WorkerMessage({"error": "x" * 50_000})))
    assert len(str(caught.value)) < 300


async def test_a_closed_idle_child_is_not_used(
    workers: TokenizerWorkers, host: ScriptedHost
) -> None:
    assert await prompt(workers, host, pack(ANSWER)) == [5, 6, 7]
    host.children[0].close()
    for _ in range(3):
        await asyncio.sleep(0)  # the loop notices
    assert await prompt(workers, host, pack(ANSWER)) == [5, 6, 7]


NONSENSE = [
    pack(WorkerMessage({})),
    pack(WorkerMessage({"forked": 7})),
    pack(WorkerMessage({"ended": 7, "code": 0})),
    pack(WorkerMessage({"ended": [], "code": 0})),
    raw({"sizes": [-1]}),
    b"",
]


async def test_a_host_that_sends_nonsense_is_ended(subtests: pytest.Subtests) -> None:
    """Fail prompts at once; the next request reloads the text of the model (catalog)."""
    for said in NONSENSE:
        with subtests.test(said=said):
            async with scripted_host() as host, tokenizer_workers(host) as workers:
                if said:
                    host.control.sendall(said)
                else:
                    host.control.close()
                await eventually(lambda: not workers.alive)
                with pytest.raises(ServiceError, match="have ended"):
                    await workers.text_ids(b"", "x", add_special_tokens=False, max_len=MAX_LEN)
                assert host.killed


async def test_an_unrequested_answer_is_an_error(
    workers: TokenizerWorkers, host: ScriptedHost
) -> None:
    """The next prompt gets an error, not the ids of another prompt."""
    answer = pack(ANSWER)
    assert await prompt(workers, host, answer + answer) == [5, 6, 7]
    with pytest.raises((ServiceError, TextError)):
        await workers.text_ids(b"", "y", add_special_tokens=False, max_len=MAX_LEN)
    assert await prompt(workers, host, answer) == [5, 6, 7]


async def test_reading_stops_while_no_receiver_waits() -> None:
    near, far = socket.socketpair()
    far.setblocking(False)
    stream = await MessageStream.over(near)
    sent = 0
    message = pack(WorkerMessage({}, [bytes(1 << 15)]))
    for _ in range(1000):
        with suppress(BlockingIOError):
            sent += far.send(message)
        await asyncio.sleep(0)
    assert sent < 4 << 20
    for _ in range(5):
        assert (await stream.receive()).parts == [bytes(1 << 15)]
    stream.close()
    far.close()


async def test_a_message_in_single_bytes() -> None:
    near, far = socket.socketpair()
    stream = await MessageStream.over(near)
    for byte in pack(WorkerMessage({"a": 1}, [b"bc", b""])):
        far.send(bytes((byte,)))
        await asyncio.sleep(0)
    found = await stream.receive()
    assert (found.head["a"], found.parts) == (1, [b"bc", b""])
    far.send(pack(WorkerMessage({}))[:-1])
    far.close()
    with pytest.raises(OSError, match="closed the connection"):
        await stream.receive()
    stream.close()


async def test_an_invalid_grammar_answer(workers: TokenizerWorkers, host: ScriptedHost) -> None:
    for answer in (
        WorkerMessage({}),
        WorkerMessage({}, [b"\xff"]),
        WorkerMessage({}, [b"a", b"b"]),
    ):
        pending = asyncio.create_task(workers.grammar(b"", Structure("regex", "a", "regex")))
        count = len(host.children)
        await eventually(lambda before=count: len(host.children) == before + 1)
        loop = asyncio.get_running_loop()
        assert await loop.sock_recv(host.children[-1], 1 << 16)
        await loop.sock_sendall(host.children[-1], pack(answer))
        with pytest.raises(ServiceError, match="have ended"):
            await pending
