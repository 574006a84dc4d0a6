"""Delivery to slow clients: complete, or ended at a limit with the source closed."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from systems.eventually import LIMIT_S, eventually

from pdserve.protos import common_pb2 as pb
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import Backpressure, SlowReaderError, deliver

pytestmark = pytest.mark.anyio


class Source:
    """A source of `count` messages of some 1,000 bytes, then `error` if set."""

    def __init__(self, count: int, error: Exception | None = None, then_wait: bool = False) -> None:
        self.given = 0
        self.closed = False
        self._count, self._error, self._then_wait = count, error, then_wait

    async def __call__(self) -> AsyncGenerator[pb.BlobChunk, None]:
        try:
            for _ in range(self._count):
                self.given += 1
                yield pb.BlobChunk(data=b"x" * 1000)
            if self._then_wait:
                await asyncio.Event().wait()
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


class Client:
    """A client that takes a message at each `take`, or everything at once with `open`."""

    def __init__(self) -> None:
        self.got = 0
        self.open = asyncio.Event()

    async def write(self, message: pb.BlobChunk) -> None:
        await self.open.wait()
        await asyncio.sleep(0)
        self.got += 1


async def ended(source: Source, client: Client, limits: Backpressure) -> ServiceError:
    """Return the outcome for a client that reads again after the source was closed."""
    running = asyncio.create_task(deliver(source(), client.write, limits))
    await eventually(lambda: source.closed)
    assert not running.done()
    client.open.set()
    with pytest.raises(ServiceError) as caught:
        await asyncio.wait_for(running, LIMIT_S)
    assert caught.value.code == pb.CANCELLED
    return caught.value


@pytest.mark.parametrize("error", [None, ServiceError(pb.INTERNAL, "broken")])
async def test_everything_is_written_before_the_end(error: Exception | None) -> None:
    source, client = Source(50, error), Client()
    running = asyncio.create_task(deliver(source(), client.write, Backpressure()))
    await eventually(lambda: source.closed)
    assert (client.got, source.given) == (0, 50), "the source never waits for the client"
    client.open.set()
    if error is None:
        await running
    else:
        with pytest.raises(ServiceError, match="broken"):
            await running
    assert client.got == 50


async def test_more_unread_bytes_than_the_limit_end_the_delivery() -> None:
    source, client = Source(10_000), Client()
    limits = Backpressure(max_buffer_bytes=20_000, stall_s=60)
    error = await ended(source, client, limits)
    assert "bytes of the response were not read" in error.message
    assert source.given <= 22
    assert client.got == 1, "the messages that gRPC had accepted"


async def test_a_client_that_reads_nothing_for_too_long_ends_the_delivery() -> None:
    source, client = Source(3, then_wait=True), Client()
    error = await ended(source, client, Backpressure(stall_s=0.05))
    assert error.message == "the client has read nothing of the response for 0.05 s"
    assert client.got == 1


async def test_a_silent_source_is_waited_for() -> None:
    source, client = Source(3, then_wait=True), Client()
    client.open.set()
    running = asyncio.create_task(deliver(source(), client.write, Backpressure(stall_s=0.02)))
    await asyncio.sleep(0.1)
    assert (running.done(), client.got) == (False, 3)
    running.cancel()  # the client leaves
    with pytest.raises(asyncio.CancelledError):
        await running
    assert source.closed


class Wire:
    """A writer of bytes whose writes may be cancelled, like an HTTP server's."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.open = asyncio.Event()
        self.cancelled = False

    async def write(self, data: bytes) -> None:
        self.writes.append(data)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def lines(count: int, error: Exception | None = None) -> AsyncGenerator[bytes, None]:
    for number in range(count):
        yield b"%d," % number
        await asyncio.sleep(0)
    if error is not None:
        raise error


async def to_wire(source: AsyncGenerator[bytes, None], wire: Wire, limits: Backpressure) -> None:
    await deliver(source, wire.write, limits, size=len, join=b"".join, interruptible=True)


@pytest.mark.parametrize("error", [None, ServiceError(pb.INTERNAL, "broken")])
async def test_waiting_messages_are_joined_in_one_write(error: Exception | None) -> None:
    wire = Wire()
    running = asyncio.create_task(to_wire(lines(5, error), wire, Backpressure()))
    await asyncio.sleep(0.05)
    assert wire.writes == [b"0,"]
    wire.open.set()
    if error is None:
        await asyncio.wait_for(running, 10)
    else:
        with pytest.raises(ServiceError, match="broken"):
            await asyncio.wait_for(running, 10)
    assert wire.writes == [b"0,", b"1,2,3,4,"]


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Backpressure(max_buffer_bytes=100, stall_s=60), "bytes of the response were not read"),
        (Backpressure(stall_s=0.05), "the client has read nothing of the response for 0.05 s"),
    ],
)
async def test_a_cancellable_write_is_cancelled_at_once(limits: Backpressure, why: str) -> None:
    wire = Wire()
    source = lines(1000)
    with pytest.raises(SlowReaderError, match=why):
        await asyncio.wait_for(to_wire(source, wire, limits), 10)
    assert wire.cancelled
    assert wire.writes == [b"0,"]
    with pytest.raises(StopAsyncIteration):
        await anext(source)  # it is closed


async def test_each_part_of_an_item_may_take_the_time_of_a_write() -> None:
    written: list[bytes] = []

    async def write(part: bytes) -> None:
        await asyncio.sleep(0.1)
        written.append(part)

    async def source() -> AsyncGenerator[list[bytes], None]:
        yield [b"%d" % number for number in range(4)]

    limits = Backpressure(stall_s=0.3)
    await deliver(source(), write, limits, size=len, parts=iter, interruptible=True)
    assert written == [b"0", b"1", b"2", b"3"]
