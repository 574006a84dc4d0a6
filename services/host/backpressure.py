"""Answers to gRPC clients that read slowly or not at all: bounded in bytes, and in time.

What a client has not read waits here. Past either bound its source is closed, which cancels the
request, so that whoever computes it never waits for a client and keeps nothing for it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from pdserve.protos.common_pb2 import CANCELLED
from pdserve.services.host.errors import ServiceError

MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, slots=True)
class Backpressure:
    """How long, and for how much, a client that does not read is waited for."""

    max_buffer_bytes: int = 1 << 20
    stall_s: float = 30.0


async def deliver(
    messages: AsyncGenerator[MessageT, None],
    write: Callable[[MessageT], Awaitable[Any]],
    patience: Backpressure,
) -> None:
    """Writes all messages; closes their source in any case.

    Raises ServiceError CANCELLED if the client does not read, and what the source raises once all
    that came before is written. gRPC can end a call only when the message in its hands is taken:
    that one, and the call, stay until the client reads, leaves or is found dead.
    """
    unread: deque[MessageT] = deque()
    num_bytes = 0
    more = asyncio.Event()
    over = False  # the source has said all
    error: Exception | None = None
    writing: asyncio.Future[Any] | None = None

    def give_up(why: str) -> None:
        nonlocal error
        error = ServiceError(CANCELLED, why)
        unread.clear()

    async def pump() -> None:
        nonlocal num_bytes, error, over
        try:
            async with aclosing(messages):
                async for message in messages:
                    unread.append(message)
                    num_bytes += message.ByteSize()
                    more.set()
                    if num_bytes > patience.max_buffer_bytes:
                        await asyncio.sleep(0)  # a burst: the writer may not have had its turn
                    if num_bytes > patience.max_buffer_bytes:
                        give_up(f"{num_bytes} bytes of the answer were not read")
                        return
        except Exception as raised:
            error = raised
        finally:
            over = True
            more.set()

    pumping = asyncio.create_task(pump())
    try:
        while unread or not over:
            if not unread:
                more.clear()
                await more.wait()
                continue
            message = unread.popleft()
            writing = asyncio.ensure_future(write(message))
            await asyncio.wait((writing,), timeout=patience.stall_s)
            if not writing.done():
                pumping.cancel()
                await asyncio.gather(pumping, return_exceptions=True)
                give_up(f"nothing of the answer was read for {patience.stall_s:g} s")
            await writing
            num_bytes -= message.ByteSize()
        if error is not None:
            raise error
    finally:
        for task in (pumping, writing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
