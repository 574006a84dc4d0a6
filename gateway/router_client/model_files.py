"""Asks live routers for the models of the fleet, for their files (blobs) and for the fleet view.

Invariant: a blob is kept only when its bytes have the digest that names it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import grpc

from pdserve.protos.common_pb2 import UNAVAILABLE, ModelCard
from pdserve.protos.router_pb2 import (
    FleetView,
    GetFleetRequest,
    ListModelsRequest,
    PickReply,
    PickRequest,
)
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.rpc.blobs import BLOB_CACHE_BYTES, BlobCache, read_blob
from pdserve.services.host.rpc.channel import may_be_closed

CALL_S = 10.0  # for a unary call
LIST_S = 2.0  # for the models of one router
OLDEST_S = 0.05  # for those of the oldest alone: one that has just come may not know all
MODELS_AGE_S = 1.0  # cards are asked for again after this
PATIENCE_S = 0.5  # for newer cards, where there are some

T = TypeVar("T")
Asked = TypeVar("Asked")


class ModelFiles:
    """Asks routers and caches their answers; see gateway/router_client/upstream.py.

    `channels` lead to the live routers, the best first. Without any, calls raise ServiceError
    UNAVAILABLE.
    """

    def __init__(self) -> None:
        self._models: tuple[float, Sequence[ModelCard]] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._blobs = BlobCache(BLOB_CACHE_BYTES)

    async def models(self, channels: Sequence[grpc.aio.Channel]) -> Sequence[ModelCard]:
        """At most MODELS_AGE_S old, unless no router answers within PATIENCE_S."""
        now = asyncio.get_running_loop().time()
        if self._models is not None and now - self._models[0] <= MODELS_AGE_S:
            return self._models[1]
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh(channels), name="models")
        if self._models is None:
            await asyncio.shield(self._refreshing)
        else:  # a router that hangs or starts again does not unname the models
            await asyncio.wait((self._refreshing,), timeout=PATIENCE_S)
        assert self._models is not None
        return self._models[1]

    async def _refresh(self, channels: Sequence[grpc.aio.Channel]) -> None:
        """Raises ServiceError UNAVAILABLE if there are no cards yet, either."""
        try:
            models = await _models_of(channels)
        except ServiceError:
            if self._models is None:
                raise
        else:
            self._models = asyncio.get_running_loop().time(), models

    async def blob(self, channels: Sequence[grpc.aio.Channel], digest: str) -> bytes:
        async def fetch(digest: str) -> bytes:
            for channel in channels[:-1]:
                with suppress(ServiceError):
                    return await read_blob(channel, digest)
            return await read_blob(_some(channels)[-1], digest)

        data = await self._blobs.get(digest, fetch)
        assert data is not None  # else read_blob has raised
        return data

    async def fleet(self, channels: Sequence[grpc.aio.Channel]) -> FleetView:
        return await _answer(RouterStub(_some(channels)[0]).GetFleet, GetFleetRequest(), CALL_S)

    async def pick(self, channels: Sequence[grpc.aio.Channel], asked: PickRequest) -> PickReply:
        return await _answer(RouterStub(_some(channels)[0]).Pick, asked, CALL_S)


async def _models_of(channels: Sequence[grpc.aio.Channel]) -> Sequence[ModelCard]:
    """What the first router knows, or without an answer within OLDEST_S any other one. Raises
    ServiceError UNAVAILABLE if none answers."""
    asked = [asyncio.create_task(_list(channel)) for channel in _some(channels)]
    try:
        await asyncio.wait(asked[:1], timeout=OLDEST_S)
        waiting = asked
        while waiting:
            for task in waiting:
                if task.done() and task.result():
                    return task.result() or ()
            waiting = [task for task in waiting if not task.done()]
            if waiting:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in asked:
            task.cancel()
    if all(task.result() is None for task in asked):
        raise _no_answer()
    return ()


async def _list(channel: grpc.aio.Channel) -> Sequence[ModelCard] | None:
    """The models of one router; None if it does not answer."""
    try:
        reply = await _answer(RouterStub(channel).ListModels, ListModelsRequest(), LIST_S)
    except ServiceError:
        return None
    return tuple(reply.models)


def _some(channels: Sequence[grpc.aio.Channel]) -> Sequence[grpc.aio.Channel]:
    """The channels. Raises ServiceError UNAVAILABLE if there are none."""
    if not channels:
        raise ServiceError(UNAVAILABLE, "no router can be reached", retry_after_s=1.0)
    return channels


async def _answer(method: Callable[[Asked], Awaitable[T]], request: Asked, limit_s: float) -> T:
    """A unary reply in time. Raises ServiceError UNAVAILABLE."""
    try:
        async with asyncio.timeout(limit_s):
            with may_be_closed():
                return await method(request)
    except (grpc.aio.AioRpcError, ConnectionError, TimeoutError) as error:
        raise _no_answer() from error


def _no_answer() -> ServiceError:
    return ServiceError(UNAVAILABLE, "the router does not answer", retry_after_s=1.0)
