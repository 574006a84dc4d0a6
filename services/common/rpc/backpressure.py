"""Delivers responses to clients that may read slowly or not at all; limits the unread bytes and the
time without a read.

The items that a client has not read yet wait here. Beyond either limit the source of the items is
closed, which cancels the request. So the producer never waits for a client, and buffers nothing for
it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pdserve.protos.common_pb2 import CANCELLED
from pdserve.services.common.errors import ServiceError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backpressure:
    """Limits for a client that does not read its response: unread bytes, and seconds without a
    read. Beyond either one the client is disconnected."""

    max_buffer_bytes: int = 1 << 20
    stall_s: float = 30.0


class SlowReaderError(ServiceError):
    """Raised when a client reads its response too slowly; the rest of the response is dropped."""

    def __init__(self, reason: str) -> None:
        super().__init__(CANCELLED, reason)


def _message_bytes(message: Any) -> int:
    size: int = message.ByteSize()
    return size


async def deliver(
    source: AsyncGenerator[T, None],
    write: Callable[[Any], Awaitable[Any]],
    limits: Backpressure,
    size: Callable[[T], int] = _message_bytes,
    join: Callable[[list[T]], T] | None = None,
    parts: Callable[[T], Iterable[Any]] | None = None,
    interruptible: bool = False,
) -> None:
    """Write all items of `source` to a client, within `limits`; close the source in any case.

    `size` returns the bytes of an item; by default an item is a protobuf message. With `join`, all
    unread items are joined and written at once. An `interruptible` write is cancelled when a limit
    is exceeded, and an item may then be written as several `parts`, one write each. gRPC's writes
    are not interruptible: gRPC can end a call only after it has sent the current message, so that
    message and the call stay until the client reads, disconnects or is found dead.

    Raises SlowReaderError beyond a limit. An error of the source is raised after all items before
    it are written.
    """
    unread = _Unread(size, limits.max_buffer_bytes)
    filling = asyncio.create_task(unread.fill(source))
    writing: asyncio.Future[Any] | None = None
    try:
        while await unread.wait():
            item = unread.take(join)
            if interruptible:
                try:
                    for part in parts(item) if parts else (item,):
                        async with asyncio.timeout(limits.stall_s) as unread.write_limit:
                            await write(part)
                except TimeoutError:
                    if not isinstance(unread.error, SlowReaderError):
                        unread.give_up(stalled(limits))
                    break
                finally:
                    unread.write_limit = None
                continue
            writing = asyncio.ensure_future(write(item))
            await asyncio.wait((writing,), timeout=limits.stall_s)
            if not writing.done():
                filling.cancel()
                await asyncio.gather(filling, return_exceptions=True)
                unread.give_up(stalled(limits))
            await writing
        if unread.error is not None:
            raise unread.error
    finally:
        for task in (filling, writing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def stalled(limits: Backpressure) -> str:
    """Return the error text for a client that has read nothing for `limits.stall_s`."""
    return f"the client has read nothing of the response for {limits.stall_s:g} s"


class _Unread(Generic[T]):
    """The queue of items that the source has produced and that are not yet being written to the
    client."""

    def __init__(self, size: Callable[[T], int], max_bytes: int) -> None:
        self.error: Exception | None = None  # how the response ends; None: in order
        self.write_limit: asyncio.Timeout | None = None  # of an interruptible write
        self._size = size
        self._max_bytes = max_bytes
        self._items: deque[T] = deque()
        self._num_bytes = 0  # of the items; what is being written does not count
        self._more = asyncio.Event()
        self._ended = False  # the source yields nothing more

    async def fill(self, source: AsyncGenerator[T, None]) -> None:
        """Move the source's items into the queue until it ends, or give up when more than
        `max_bytes` are unread."""
        try:
            async with aclosing(source):
                async for item in source:
                    self._items.append(item)
                    self._num_bytes += self._size(item)
                    self._more.set()
                    if self._num_bytes > self._max_bytes:
                        await asyncio.sleep(0)  # the writer may not have run during a burst
                    if self._num_bytes > self._max_bytes:
                        self.give_up(
                            f"{self._num_bytes} bytes of the response were not read by the client"
                        )
                        if self.write_limit is not None:
                            self.write_limit.reschedule(0)  # at once
                        return
        except Exception as raised:
            self.error = raised
        finally:
            self._ended = True
            self._more.set()

    def give_up(self, reason: str) -> None:
        """Drop all unread items, and let the response end with a SlowReaderError."""
        self.error = SlowReaderError(reason)
        self._items.clear()

    async def wait(self) -> bool:
        """Wait until there is an item to write; return False if the source has ended and all items
        are taken."""
        while not self._items and not self._ended:
            self._more.clear()
            await self._more.wait()
        return bool(self._items)

    def take(self, join: Callable[[list[T]], T] | None) -> T:
        """Remove and return the next item to write; with `join`, all unread items joined into
        one."""
        if join is None:
            item = self._items.popleft()
            self._num_bytes -= self._size(item)
            return item
        items = list(self._items)
        self._items.clear()
        self._num_bytes = 0
        return join(items)
