"""Says whether the gateway can answer: a router must be there, with a live decode worker."""

from pdserve.gateway.router_client.upstream import Upstream
from pdserve.protos.fleet_pb2 import DECODE
from pdserve.services.host.errors import ServiceError


class Readiness:
    """Ready while some model has a live decode worker, until `drain` is called."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._draining = False

    def drain(self) -> None:
        """Be not ready from now on: the process is about to end."""
        self._draining = True

    async def models(self) -> list[str]:
        """Names of the models that can be asked now; empty: not ready."""
        if self._draining:
            return []
        try:
            view = await self._upstream.fleet()
        except ServiceError:
            return []
        return sorted(
            {
                worker.hello.card.name
                for worker in view.workers
                if worker.hello.role == DECODE and worker.state == "live"
            }
        )

    async def why_not(self) -> str:
        """The reason for not being ready, as a sentence for people."""
        if self._draining:
            return "the server is shutting down"
        try:
            await self._upstream.fleet()
        except ServiceError as error:
            return error.message
        return "no decode worker is live yet"
