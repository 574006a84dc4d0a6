"""An event stream: events are written on arrival, and buffered for a client that lags."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.gateway.http import responses
from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.responses import DROP, HELD, KEEPS_UP, EventStream, HeldResponses
from pdserve.protos.common_pb2 import INVALID_ARGUMENT
from pdserve.services.common.errors import ServiceError

pytestmark = pytest.mark.anyio
LIMITS = HttpLimits(1 << 20, 1 << 20, 10.0, 100, 0.2)


class Client:
    """A client that accepts `lags_after` pieces and then nothing more."""

    def __init__(self, lags_after: int) -> None:
        self.taken: list[bytes] = []
        self.tasks: set[asyncio.Task[Any]] = set()  # all tasks seen at a write
        self.dropped = False
        self._lags_after = lags_after

    async def send(self, message: Any) -> None:
        if message["type"] != "http.response.body":
            return
        if not self.keeps_up():
            await asyncio.Event().wait()
        self.taken.append(message["body"])
        self.tasks |= asyncio.all_tasks()

    def keeps_up(self) -> bool:
        return len(self.taken) < self._lags_after

    def drop(self) -> None:
        self.dropped = True

    async def ask(
        self, events: AsyncGenerator[bytes, None], errors: Any = None, ping: Any = None
    ) -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()

        extensions = {KEEPS_UP: self.keeps_up, DROP: self.drop, HELD: HeldResponses(1 << 20)}
        scope = {"type": "http", "extensions": extensions}
        await EventStream(events, errors, LIMITS, ping=ping)(scope, receive, self.send)


class Source:
    """Yield the given count of numbers, one per event-loop pass."""

    def __init__(self, count: int) -> None:
        self.said = 0
        self.closed = False
        self._count = count

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(self._count):
                await asyncio.sleep(0)
                self.said += 1
                yield b"%04d" % number
        finally:
            self.closed = True


async def test_events_are_written_on_arrival_by_one_task():
    client, source = Client(1000), Source(50)
    before = asyncio.all_tasks()
    await client.ask(source.events())
    assert client.taken == [b"%04d" % number for number in range(50)] + [b""]
    assert len(client.tasks - before) == 2  # the sender and the connection watcher
    assert source.closed
    assert not client.dropped


@pytest.mark.parametrize("lags_after", [0, 1, 10])
async def test_buffering_for_a_lagging_client_is_bounded(lags_after: int):
    client, source = Client(lags_after), Source(1000)
    await client.ask(source.events())
    assert client.taken == [b"%04d" % number for number in range(lags_after)]
    assert lags_after < source.said < lags_after + 60  # up to 100 bytes are buffered, in items of 4
    assert source.closed
    assert client.dropped


async def test_buffering_is_bounded_for_a_client_that_lags_from_the_head_on():
    """Lag from the head on, as when the previous answer is unread: no event is sent."""

    class Full(Client):
        async def send(self, message: Any) -> None:
            self.begun = True
            await super().send(message)

        def keeps_up(self) -> bool:
            return not self.begun

    client, source = Full(1), Source(1000)
    client.begun = False
    await client.ask(source.events())
    assert client.taken == []
    assert 0 < source.said < 60
    assert client.dropped


async def test_a_lagging_client_that_recovers_gets_everything():
    class Slow(Client):
        async def send(self, message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(0)
                self.taken.append(message["body"])

        def keeps_up(self) -> bool:
            return len(self.taken) < 3

    client, source = Slow(0), Source(200)
    await client.ask(source.events())
    assert b"".join(client.taken) == b"".join(b"%04d" % number for number in range(200))
    assert source.closed


@pytest.mark.parametrize("fails", [False, True])
async def test_the_head_is_sent_once_and_first(monkeypatch: pytest.MonkeyPatch, fails: bool):
    """Also while the other task is still sending it, and before an error."""
    monkeypatch.setattr(responses, "HEAD_S", 0.0)
    monkeypatch.setattr(responses, "SILENCE_S", 0.01)
    sent: list[tuple[str, int]] = []

    class SlowHead(Client):
        async def send(self, message: Any) -> None:
            if message["type"] == "http.response.start":
                await asyncio.sleep(0.05)
            sent.append((message["type"].rpartition(".")[2], message.get("status", 0)))

        def keeps_up(self) -> bool:
            return True

    async def events() -> AsyncGenerator[bytes, None]:
        if fails:
            raise ServiceError(INVALID_ARGUMENT, "no")
        await asyncio.sleep(0.02)
        yield b"event"

    shape = SimpleNamespace(statuses={}, error_object=lambda error: {"error": error.message})
    await SlowHead(0).ask(events(), shape, lambda: b"ping")
    if fails:
        assert sent == [("start", 400), ("body", 0)]
    else:
        assert sent[0] == ("start", 200)
        assert {kind for kind, _ in sent[1:]} == {"body"}
        assert len(sent) > 2
