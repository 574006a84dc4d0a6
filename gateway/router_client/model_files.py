"""Requests the list of models, the files of models (blobs) and the view of the fleet from the
connected routers.

If every worker joins every router, any router knows the whole fleet and one reply suffices. In a
sharded fleet a router knows only the workers that joined it, so the replies of all routers are
merged.

Invariant: a blob is kept only if its bytes match the SHA-256 digest that names it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import grpc

from pdserve.protos.common_pb2 import UNAVAILABLE, ModelCard
from pdserve.protos.router_pb2 import (
    FleetView,
    GetFleetRequest,
    ListModelsRequest,
    ListModelsResponse,
    PickReply,
    PickRequest,
    WorkerView,
)
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.common.capabilities import merged_card
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import BLOB_CACHE_BYTES, BlobCache, may_be_closed, read_blob

CALL_S = 10.0  # timeout of a unary call
LIST_S = 2.0  # timeout of one router's models or fleet view
REST_S = 0.3  # wait for the other routers, once one reports that the fleet is sharded
OLD_S = 10.0  # older replies of a router are dropped
OLDEST_S = 0.05  # wait for the oldest router alone: a new one may not know all models
MODELS_AGE_S = 1.0  # cards are requested again after this
PATIENCE_S = 0.5  # wait for newer cards, if there are older ones

T = TypeVar("T")
RequestT = TypeVar("RequestT")


class LiveRouter(NamedTuple):
    """The address of a router with an open session, and the gRPC channel for calls to it."""

    address: str
    channel: grpc.aio.Channel


class ModelFiles:
    """Calls routers for models, blobs and the fleet view, and caches the replies; the methods are
    described in gateway/router_client/upstream.py.

    The parameter `routers` lists the connected routers, in order of preference. If it is empty,
    methods raise ServiceError UNAVAILABLE.
    """

    def __init__(self) -> None:
        self._models: tuple[float, Sequence[ModelCard]] | None = None
        # The last reply of each router of a sharded fleet, and its time; empty in a full mesh.
        self._listed: dict[str, tuple[float, Sequence[ModelCard]]] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._blobs = BlobCache(BLOB_CACHE_BYTES)

    @property
    def sharded(self) -> bool:
        """Whether the fleet is sharded: some workers have joined only some of the routers."""
        return bool(self._listed)

    def knowing(self, model: str, now: float) -> set[str]:
        """Return the addresses of the routers that reported a worker of the model within the last
        OLD_S. Empty if the fleet is not sharded."""
        return {
            address
            for address, (replied_at, cards) in self._listed.items()
            if now - replied_at <= OLD_S and any(card.name == model for card in cards)
        }

    async def models(self, routers: Sequence[LiveRouter]) -> Sequence[ModelCard]:
        """Return the cards of the fleet's models, at most MODELS_AGE_S old. If no router replies
        within PATIENCE_S, return older cards."""
        now = asyncio.get_running_loop().time()
        if self._models is not None and now - self._models[0] <= MODELS_AGE_S:
            return self._models[1]
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh(routers), name="models")
        if self._models is None:
            await asyncio.shield(self._refreshing)
        else:  # a router that hangs or restarts must not remove the models
            await asyncio.wait((self._refreshing,), timeout=PATIENCE_S)
        assert self._models is not None
        return self._models[1]

    async def _refresh(self, routers: Sequence[LiveRouter]) -> None:
        """Replace the cached model cards by those of the routers' replies. If no router replies,
        keep the old cards; if there are none, raise ServiceError UNAVAILABLE."""
        try:
            models = await self._query_models(routers)
        except ServiceError:
            if self._models is None:
                raise
        else:
            self._models = asyncio.get_running_loop().time(), models

    async def _query_models(self, routers: Sequence[LiveRouter]) -> Sequence[ModelCard]:
        """Query the model cards from the routers at once. Return those of the first router, or of
        another one if it does not reply within OLDEST_S or has none; if a reply says that the fleet
        is sharded, return the models of all routers. Raises ServiceError UNAVAILABLE if no router
        replies."""
        queries = {r.address: asyncio.create_task(_list(r.channel)) for r in _nonempty(routers)}
        try:
            reply = await _first_with_models(list(queries.values()))
            # The calls to the others are open already; the first may know no sharded worker.
            await asyncio.wait(queries.values(), timeout=REST_S if self.sharded else OLDEST_S)
            if any(t.done() and (r := t.result()) and r.sharded for t in queries.values()):
                await asyncio.wait(queries.values(), timeout=REST_S)
                return self._union({a: t.result() for a, t in queries.items() if t.done()}, queries)
            self._listed.clear()
        finally:
            for task in queries.values():
                task.cancel()
        if reply is not None:
            return tuple(reply.models)
        if all(task.result() is None for task in queries.values()):
            raise _no_reply()
        return ()

    def _union(
        self, replies: Mapping[str, ListModelsResponse | None], routers: Iterable[str]
    ) -> Sequence[ModelCard]:
        """Merge the model cards of several routers, using a router's last reply (at most OLD_S old)
        if it has no new one. If cards with different tokenizers have one name, that of the router
        that comes first counts."""
        now = asyncio.get_running_loop().time()
        recent = {a: listed for a, listed in self._listed.items() if now - listed[0] <= OLD_S}
        new = {a: (now, tuple(reply.models)) for a, reply in replies.items() if reply is not None}
        merged_replies = recent | new
        self._listed = {
            address: merged_replies[address] for address in routers if address in merged_replies
        }
        cards: dict[str, list[ModelCard]] = {}
        for _, models in self._listed.values():
            for card in models:
                known = cards.setdefault(card.name, [])
                if not known or card.kv_identity.tokenizer == known[0].kv_identity.tokenizer:
                    known.append(card)
        return tuple(merged_card(cards[name]) for name in sorted(cards))

    async def blob(self, routers: Sequence[LiveRouter], digest: str) -> bytes:
        async def fetch(digest: str) -> bytes:
            for router in routers[:-1]:
                with suppress(ServiceError):
                    return await read_blob(router.channel, digest)
            return await read_blob(_nonempty(routers)[-1].channel, digest)

        data = await self._blobs.get(digest, fetch)
        assert data is not None  # else read_blob has raised
        return data

    async def fleet(self, routers: Sequence[LiveRouter]) -> FleetView:
        """Return the first router's view of the fleet, or another router's if the first does not
        reply or knows no worker; in a sharded fleet, the merged views of all routers. Raises
        ServiceError UNAVAILABLE if no router replies."""
        first, *others = _nonempty(routers)
        view = await _fleet_of(first.channel)
        if view is not None and view.workers and not self._is_sharded(view):
            return view
        replies = [view, *await asyncio.gather(*(_fleet_of(router.channel) for router in others))]
        views = [reply for reply in replies if reply is not None]
        if not views:
            raise _no_reply()
        if any(self._is_sharded(view) for view in views):
            return merged(views)
        return next((view for view in views if view.workers), views[0])

    def _is_sharded(self, view: FleetView) -> bool:
        return self.sharded or any(worker.hello.join_routers for worker in view.workers)

    async def pick(self, routers: Sequence[LiveRouter], request: PickRequest) -> PickReply:
        """Ask the first router where it would place a request, and return its reply. In a sharded
        fleet, ask the next routers in turn until one has a worker for it."""
        first, *others = _nonempty(routers)
        reply: PickReply = await _answer(RouterStub(first.channel).Pick, request, CALL_S)
        for router in others if self._listed else ():
            if reply.workers or reply.overloaded:
                break
            with suppress(ServiceError):
                next_ = await _answer(RouterStub(router.channel).Pick, request, CALL_S)
                next_.elsewhere &= reply.elsewhere
                reply = next_
        return reply


async def _first_with_models(
    queries: Sequence["asyncio.Task[ListModelsResponse | None]"],
) -> ListModelsResponse | None:
    """Return the first reply that names a model: the first router's if it arrives within OLDEST_S,
    else the one that arrives first. None if no reply names a model."""
    await asyncio.wait(queries[:1], timeout=OLDEST_S)
    waiting = list(queries)
    while waiting:
        for task in waiting:
            if task.done() and (reply := task.result()) is not None and reply.models:
                return reply
        waiting = [task for task in waiting if not task.done()]
        if waiting:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    return None


async def _list(channel: grpc.aio.Channel) -> ListModelsResponse | None:
    """Query the model cards of one router; None if it does not reply within LIST_S."""
    with suppress(ServiceError):
        return await _answer(RouterStub(channel).ListModels, ListModelsRequest(), LIST_S)
    return None


async def _fleet_of(channel: grpc.aio.Channel) -> FleetView | None:
    """Query the fleet view of one router; None if it does not reply within LIST_S."""
    with suppress(ServiceError):
        return await _answer(RouterStub(channel).GetFleet, GetFleetRequest(), LIST_S)
    return None


def merged(views: Sequence[FleetView]) -> FleetView:
    """Merge the fleet views of several routers into one. Each worker appears once: as seen by a
    router that it is not leaving, if possible, and of these by the one that heard from it last.
    Counters are summed."""
    workers: dict[bytes, WorkerView] = {}
    for worker in (worker for view in views for worker in view.workers):
        incarnation = worker.hello.incarnation
        if incarnation not in workers or _preference(worker) < _preference(workers[incarnation]):
            workers[incarnation] = worker
    fleet = FleetView(workers=workers.values(), router_incarnation=views[0].router_incarnation)
    for field in FleetView.DESCRIPTOR.fields:
        if field.cpp_type == field.CPPTYPE_UINT64:
            setattr(fleet, field.name, sum(getattr(view, field.name) for view in views))
    return fleet


def _preference(worker: WorkerView) -> tuple[bool, float]:
    return worker.state == "leaving", worker.silent_s


def _nonempty(routers: Sequence[LiveRouter]) -> Sequence[LiveRouter]:
    """Return `routers`; raise ServiceError UNAVAILABLE if it is empty."""
    if not routers:
        raise ServiceError(UNAVAILABLE, "no router can be reached", retry_after_s=1.0)
    return routers


async def _answer(
    method: Callable[[RequestT], Awaitable[T]], request: RequestT, limit_s: float
) -> T:
    """Make a unary gRPC call and return the reply. Raises ServiceError UNAVAILABLE if the call
    fails or takes longer than `limit_s` seconds."""
    try:
        async with asyncio.timeout(limit_s):
            with may_be_closed():
                return await method(request)
    except (grpc.aio.AioRpcError, ConnectionError, TimeoutError) as error:
        raise _no_reply() from error


def _no_reply() -> ServiceError:
    return ServiceError(UNAVAILABLE, "the router does not answer", retry_after_s=1.0)
