"""Decides whether the gateway is ready: a router responds, has a live decode worker, and the
tokenizer of the worker's model is loaded."""

import asyncio
from typing import NamedTuple

from pdserve.gateway.catalog import Catalog
from pdserve.gateway.router_client import Upstream
from pdserve.protos.common_pb2 import ModelCard
from pdserve.protos.fleet_pb2 import DECODE
from pdserve.protos.router_pb2 import FleetView
from pdserve.services.common.errors import ServiceError

LOAD_S = 0.5  # how long one check waits for the first tokenizer


class Found(NamedTuple):
    """The result of a check: the sorted names of the available models; if there are none, the
    reason as text for people."""

    models: list[str]
    why_not: str = ""


ENDING = Found([], "the server is shutting down")


class Readiness:
    """Ready while some model is available, until `drain` is called."""

    def __init__(self, upstream: Upstream, catalog: Catalog) -> None:
        self._upstream = upstream
        self._catalog = catalog
        self._draining = False
        self._checking: asyncio.Task[Found] | None = None

    def drain(self) -> None:
        """Stop being ready, because the process is about to end."""
        self._draining = True

    @property
    def draining(self) -> bool:
        return self._draining

    async def models(self) -> list[str]:
        """Return the available models; empty if not ready."""
        return (await self.check()).models

    async def check(self) -> Found:
        """Query the routers; concurrent calls share one query."""
        if self._draining:
            return ENDING
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check(), name="readiness")
        result = await asyncio.shield(self._checking)
        return ENDING if self._draining else result

    async def _check(self) -> Found:
        try:
            cards = _live(await self._upstream.fleet())
        except ServiceError as error:
            return Found([], error.message)
        if not cards:
            return Found([], "no decode worker is live yet")
        models = await self._catalog.ready([cards[name] for name in sorted(cards)], LOAD_S)
        return Found(models, "" if models else "no model's tokenizer is loaded yet")


def _live(view: FleetView) -> dict[str, ModelCard]:
    """Return the models of live decode workers by name; the first card wins, as in ListModels."""
    cards: dict[str, ModelCard] = {}
    for worker in view.workers:
        if worker.hello.role == DECODE and worker.state == "live":
            cards.setdefault(worker.hello.card.name, worker.hello.card)
    return cards
