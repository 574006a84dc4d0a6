"""The calls that the gateway makes to a router; tests answer the same calls from a script."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, TypeVar

from pdserve.protos.common_pb2 import ModelCard, Start
from pdserve.protos.router_pb2 import FleetView, RequestEvent

T = TypeVar("T")

TakeToken = Callable[[int, int], T | None]
"""Takes the next token of a choice, by its number and its id, where it arrives. What it returns is
for whoever iterates over the events."""


class Upstream(Protocol):
    """A router. Calls raise ServiceError where they cannot answer."""

    def open(
        self, start: Start, take_token: TakeToken[T] | None = None
    ) -> AsyncGenerator[RequestEvent | T, None]:
        """Run a request. The last event is its one Finished or Failed.

        `take_token` may be given a token instead of an event with it, while whoever iterates waits
        for an event and there is none: so no task has a turn for it. What it raises is raised here.
        Closing the iterator before the last event cancels the request at once.
        """
        ...

    def cancel(self, request: str, choices: Sequence[int] = ()) -> None:
        """End a request (no choices named) or some of its choices; never blocks."""
        ...

    async def models(self) -> Sequence[ModelCard]:
        """Cards of the models that live workers serve; may be a second old."""
        ...

    async def blob(self, digest: str) -> bytes:
        """A blob by its hex SHA-256, verified."""
        ...

    async def fleet(self) -> FleetView:
        """The router's view of its workers, now."""
        ...
