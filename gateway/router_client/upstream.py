"""The calls that the gateway makes to a router (tests script the replies), and streams merged in
order of arrival.

Ownership: the merged stream owns its sources; closing it, or an error in one, closes all.
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
    """A router. Calls raise ServiceError if they fail."""

    def open(
        self, start: Start, take_token: TakeToken[T] | None = None
    ) -> AsyncGenerator[RequestEvent | T, None]:
        """Run a request. The last event is its one Finished or Failed.

        While the consumer waits and there is no event, `take_token` may receive a token, which then
        appears in no event: this saves a task switch per token. Its exceptions are raised here.
        Closing the iterator before the last event cancels the request at once.
        """
        ...

    def cancel(self, request: str, choices: Sequence[int] = ()) -> None:
        """End a request (no choices given) or some of its choices; never blocks."""
        ...

    async def models(self) -> Sequence[ModelCard]:
        """Cards of the models that live workers serve; may be a second old."""
        ...

    async def blob(self, digest: str) -> bytes:
        """A blob by its hex SHA-256, verified."""
        ...

    async def fleet(self) -> FleetView:
        """The routers' current view of their workers; each worker once."""
        ...


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all sources. An exception in one is raised here after the others are closed."""
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
