"""The calls that the gateway makes to a router; tests answer the same calls from a script."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from pdserve.protos.common_pb2 import ModelCard, Start
from pdserve.protos.router_pb2 import FleetView, RequestEvent


class Upstream(Protocol):
    """A router. Calls raise ServiceError where they cannot answer."""

    def open(self, start: Start) -> AsyncGenerator[RequestEvent, None]:
        """Run a request. The last event is its one Finished or Failed.

        Closing the iterator before that cancels the request at once.
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
