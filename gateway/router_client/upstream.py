"""The interface of the calls that the gateway makes to routers, which tests implement with scripted
replies; and `merge`, which merges streams in order of arrival.

Ownership: a merged stream owns its source streams; closing it, or an error in one, closes them all.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pdserve.protos.common_pb2 import ModelCard, Start
from pdserve.protos.router_pb2 import FleetView, RequestEvent

T = TypeVar("T")
TakeToken = Callable[[int, int], T | None]
"""Takes the number of a choice and the id of its next token as soon as that arrives. Its result is
yielded to the consumer of the events in place of the token."""
_AHEAD = 64  # items read ahead of the consumer


class Upstream(Protocol):
    """The routers as the gateway sees them. All methods raise ServiceError if a call fails."""

    def open(
        self, start: Start, take_token: TakeToken[T] | None = None
    ) -> AsyncGenerator[RequestEvent | T, None]:
        """Run a request and yield its events. The last one is the only Finished or Failed event.

        While the consumer waits and no event is queued, a token may be passed to `take_token`
        instead of becoming an event, which saves a task switch per token; its result is yielded,
        and an exception that it raises is raised here. Closing the iterator before the last event
        cancels the request at once.
        """
        ...

    def cancel(self, request: str, choices: Sequence[int] = ()) -> None:
        """Cancel choices of a running request, or the whole request if `choices` is empty; returns
        at once."""
        ...

    async def models(self) -> Sequence[ModelCard]:
        """Return the cards of the models that connected workers serve; they may be a second old."""
        ...

    async def blob(self, digest: str) -> bytes:
        """Return a blob (a file of a model) by its SHA-256 digest in hexadecimal; its content is
        verified."""
        ...

    async def fleet(self) -> FleetView:
        """Return the routers' current view of the fleet, with each worker once."""
        ...


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Merge streams into one that yields each item as it arrives. An exception in one stream closes
    all the others and is then raised here."""
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    queue: asyncio.Queue[T | _End] = asyncio.Queue(_AHEAD)

    async def pump(source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await queue.put(item)
        except Exception as error:
            await queue.put(_End(error))
        else:
            await queue.put(_End(None))

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            received = await queue.get()
            if not isinstance(received, _End):
                yield received
            elif received.error is not None:
                raise received.error
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
