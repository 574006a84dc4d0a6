"""Tokens taken on arrival: each once, in order, and only while the consumer waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from fakes.scripted_router import start
from systems.eventually import eventually

from pdserve.gateway.router_client import RouterClient
from pdserve.gateway.router_client import client as client_module
from pdserve.gateway.router_client.session import RouterConnection
from pdserve.protos import common_pb2 as pb
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.common import discovery
from pdserve.services.common.rpc import NumberedChoice

pytestmark = pytest.mark.anyio


class Session:
    """A live session to a router scripted by the test."""

    address = "r:1"
    has_worked = True
    num_open = 0
    up_since = 0.0

    def __init__(self) -> None:
        self.channel = object()
        self.failure = asyncio.get_running_loop().create_future()
        self.sent: list[object] = []

    async def close(self) -> None:
        pass

    def load(self, now: float) -> float:
        return 0.0

    def count_sent(self, now: float) -> None:
        pass

    def send(self, message: object) -> None:
        self.sent.append(message)


@pytest.fixture
async def session(anyio_backend) -> RouterConnection:
    return Session()  # type: ignore[return-value]


@pytest.fixture
async def client(session: RouterConnection, monkeypatch) -> AsyncIterator[RouterClient]:
    monkeypatch.setattr(discovery, "resolve", lambda name: [name])
    monkeypatch.setattr(client_module, "RouterConnection", lambda *_: session)
    client = RouterClient(["r:1"], None, b"g" * 16)  # type: ignore[arg-type]
    await client.start()
    await eventually(lambda: client.num_connected)
    yield client
    await client.close()


def row(position: int, id_: int, epoch: int = 0) -> tuple[NumberedChoice, int, int]:
    return NumberedChoice("r", b"a" * 16, epoch, 0), position, id_


def first() -> RequestEvent:
    return RequestEvent(tokens=pb.Tokens(request="r", ids=[100]))


def finished(epoch: int = 0) -> RequestEvent:
    return RequestEvent(finished=pb.Finished(request="r", epoch=epoch))


class Consumer:
    """Record the events iterated over, and the tokens taken on arrival."""

    def __init__(self, client: RouterClient) -> None:
        self.seen: list[object] = []
        self.taken: list[int] = []
        self.pause = asyncio.Event()  # the consumer pauses while it is not set
        self.pause.set()
        self._client = client
        self.task = asyncio.create_task(self._run())

    def take(self, choice: int, id_: int) -> str | None:
        assert choice == 0
        if id_ == 666:
            raise ValueError("a bad token")
        self.taken.append(id_)
        self.seen.append(id_)
        return f"made of {id_}" if id_ % 2 else None

    async def _run(self) -> None:
        async with aclosing(self._client.open(start(), self.take)) as items:
            async for item in items:
                of_event = isinstance(item, RequestEvent) and item.HasField("tokens")
                self.seen += list(item.tokens.ids) if of_event else [item]
                await self.pause.wait()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_token_is_taken_on_arrival(client, session):
    consumer = Consumer(client)
    await turns()
    client.event(session, first())
    await turns()
    client.rows(session, [row(1, 102)])
    assert consumer.taken == [102], "the token must be taken before any task runs"
    client.rows(session, [row(2, 104), row(3, 106)])
    assert consumer.seen == [100, 102, 104, 106]
    client.rows(session, [row(3, 106), row(2, 104)])  # repeated
    client.event(session, finished())
    await consumer.task
    assert consumer.seen == [100, 102, 104, 106, finished()]


async def test_the_result_of_taking_replaces_the_token(client, session):
    """Queue later tokens until the consumer has handled the result."""
    consumer = Consumer(client)
    await turns()
    client.event(session, first())
    await turns()
    client.rows(session, [row(1, 101), row(2, 102), row(3, 103)])
    assert consumer.taken == [101]
    await turns()
    assert consumer.seen == [100, 101, "made of 101", 102, 103]
    client.rows(session, [row(4, 104)])
    assert consumer.taken == [101, 104]
    client.event(session, finished())
    await consumer.task


async def test_no_token_is_taken_while_the_consumer_is_busy(client, session):
    consumer = Consumer(client)
    consumer.pause.clear()
    await turns()
    client.event(session, first())
    await turns()
    client.rows(session, [row(1, 102), row(2, 104)])
    await turns()
    assert consumer.seen == [100]
    consumer.pause.set()
    await turns()
    assert consumer.seen == [100, 102, 104]
    assert consumer.taken == []
    client.rows(session, [row(3, 106)])
    assert consumer.taken == [106]
    client.event(session, finished())
    await consumer.task


async def test_an_error_fails_the_request_and_keeps_the_session(client, session):
    consumer = Consumer(client)
    await turns()
    client.event(session, first())
    await turns()
    client.rows(session, [row(1, 666), row(2, 104)])
    with pytest.raises(ValueError, match="a bad token"):
        await consumer.task
    assert [message.WhichOneof("message") for message in session.sent] == ["start", "cancel"]


async def test_tokens_of_an_earlier_epoch_and_a_gap(client, session):
    """A re-issued request continues after the tokens already taken."""
    consumer = Consumer(client)
    await turns()
    client.event(session, first())
    await turns()
    client.rows(session, [row(1, 102)])
    client.down(session)
    again = session.sent[-1].start
    assert (again.epoch, list(again.choices[0].generated_ids)) == (1, [100, 102])
    client.rows(session, [row(2, 104)])
    assert consumer.taken == [102], "a token of a past epoch must be ignored"
    client.rows(session, [row(2, 104, epoch=1)])
    assert consumer.taken == [102, 104]
    client.rows(session, [row(4, 108, epoch=1)])
    await turns()
    assert consumer.taken == [102, 104]
    assert consumer.seen[-1].failed.failure.code == pb.INTERNAL
    await consumer.task
