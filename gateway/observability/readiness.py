"""Says whether the gateway can answer: a router must be there, with a live decode worker, and the
tokenizer of its model must be loaded."""

from pdserve.gateway.catalog import Catalog
from pdserve.gateway.router_client.upstream import Upstream
from pdserve.protos.common_pb2 import ModelCard
from pdserve.protos.fleet_pb2 import DECODE
from pdserve.protos.router_pb2 import FleetView
from pdserve.services.host.errors import ServiceError

LOAD_S = 0.5  # how long one check waits for the first tokenizer


class Readiness:
    """Ready while some model can be asked, until `drain` is called."""

    def __init__(self, upstream: Upstream, catalog: Catalog) -> None:
        self._upstream = upstream
        self._catalog = catalog
        self._draining = False

    def drain(self) -> None:
        """Be not ready from now on: the process is about to end."""
        self._draining = True

    async def models(self) -> list[str]:
        """Sorted names of the models that can be asked now; empty: not ready."""
        if self._draining:
            return []
        try:
            view = await self._upstream.fleet()
        except ServiceError:
            return []
        cards = _live(view)
        return await self._catalog.ready([cards[name] for name in sorted(cards)], LOAD_S)

    async def why_not(self) -> str:
        """The reason for not being ready, as a sentence for people."""
        if self._draining:
            return "the server is shutting down"
        try:
            view = await self._upstream.fleet()
        except ServiceError as error:
            return error.message
        return (
            "no model's tokenizer is loaded yet" if _live(view) else "no decode worker is live yet"
        )


def _live(view: FleetView) -> dict[str, ModelCard]:
    """The models of live decode workers, by name; of two cards the first, as in ListModels."""
    cards: dict[str, ModelCard] = {}
    for worker in view.workers:
        if worker.hello.role == DECODE and worker.state == "live":
            cards.setdefault(worker.hello.card.name, worker.hello.card)
    return cards
