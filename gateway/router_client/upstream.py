"""The calls that the gateway makes to a router; tests script the replies."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, TypeVar

from pdserve.protos.common_pb2 import ModelCard, Start
from pdserve.protos.router_pb2 import FleetView, RequestEvent

T = TypeVar("T")

TakeToken = Callable[[int, int], T | None]
"""Takes the number of a choice and the id of its next token, as soon as that arrives. What it
returns is given to whoever iterates over the events, in the token's place."""


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
