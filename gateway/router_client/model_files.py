"""Asks live routers for the models of the fleet, for their files (blobs) and for the fleet view.

Invariant: a blob is kept only when its bytes have the digest that names it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from pdserve.protos.common_pb2 import UNAVAILABLE, ModelCard
from pdserve.protos.router_pb2 import FleetView, GetFleetRequest, ListModelsRequest
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.rpc.blobs import BLOB_CACHE_BYTES, BlobCache, read_blob
from pdserve.services.host.rpc.channel import may_be_closed

CALL_S = 10.0  # for a unary call
LIST_S = 2.0  # for the models of one router
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
        began = asyncio.get_running_loop().time()
        try:
            self._models = began, await _models_of(channels)
        except ServiceError:
            if self._models is None:
                raise

    async def blob(self, channels: Sequence[grpc.aio.Channel], digest: str) -> bytes:
        async def fetch(digest: str) -> bytes:
            return await read_blob(_first(channels), digest)

        data = await self._blobs.get(digest, fetch)
        assert data is not None  # else read_blob has raised
        return data

    async def fleet(self, channels: Sequence[grpc.aio.Channel]) -> FleetView:
        return await _answer(RouterStub(_first(channels)).GetFleet, GetFleetRequest())


async def _models_of(channels: Sequence[grpc.aio.Channel]) -> tuple[ModelCard, ...]:
    """What the first router says that knows any. Raises ServiceError UNAVAILABLE."""
    found: tuple[ModelCard, ...] | None = None
    failed: ServiceError | None = None
    for channel in channels or [_first(channels)]:
        try:
            asked = RouterStub(channel).ListModels
            found = tuple((await _answer(asked, ListModelsRequest(), LIST_S)).models)
        except ServiceError as error:
            failed = error
        if found:
            return found
    if found is None:
        assert failed is not None
        raise failed
    return found


def _first(channels: Sequence[grpc.aio.Channel]) -> grpc.aio.Channel:
    if not channels:
        raise ServiceError(UNAVAILABLE, "no router can be reached", retry_after_s=1.0)
    return channels[0]


async def _answer(
    method: Callable[[Asked], Awaitable[T]], request: Asked, limit_s: float = CALL_S
) -> T:
    """A unary reply in time. Raises ServiceError UNAVAILABLE."""
    try:
        async with asyncio.timeout(limit_s):
            with may_be_closed():
                return await method(request)
    except (grpc.aio.AioRpcError, ConnectionError, TimeoutError) as error:
        raise ServiceError(UNAVAILABLE, "the router does not answer", retry_after_s=1.0) from error
