"""Asks a live router for the models of the fleet, for their files (blobs) and for its fleet view.

Invariant: a blob is kept only when its bytes have the digest that names it.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import grpc

from pdserve.protos.common_pb2 import UNAVAILABLE, ModelCard
from pdserve.protos.router_pb2 import FleetView, GetFleetRequest, ListModelsRequest
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.host.blobs import BLOB_CACHE_BYTES, BlobCache, read_blob
from pdserve.services.host.errors import ServiceError

CALL_S = 10.0  # for a unary call
MODELS_AGE_S = 1.0  # cards are asked for again after this

T = TypeVar("T")


class ModelFiles:
    """Asks the router and caches its answers; see gateway/router_client/upstream.py.

    `channel` leads to the live router. Without one (None) calls raise ServiceError UNAVAILABLE.
    """

    def __init__(self) -> None:
        self._models: tuple[float, Sequence[ModelCard]] | None = None
        self._models_lock = asyncio.Lock()
        self._blobs = BlobCache(BLOB_CACHE_BYTES)

    async def models(self, channel: grpc.aio.Channel | None) -> Sequence[ModelCard]:
        async with self._models_lock:
            now = asyncio.get_running_loop().time()
            if self._models is None or now - self._models[0] > MODELS_AGE_S:
                try:
                    reply = await _answer(
                        RouterStub(_live(channel)).ListModels(ListModelsRequest())
                    )
                except ServiceError:
                    if self._models is None:
                        raise
                    return self._models[1]  # a restarting router does not unname the models
                self._models = (now, tuple(reply.models))
            return self._models[1]

    async def blob(self, channel: grpc.aio.Channel | None, digest: str) -> bytes:
        async def fetch(digest: str) -> bytes:
            return await read_blob(_live(channel), digest)

        data = await self._blobs.get(digest, fetch)
        assert data is not None  # else read_blob has raised
        return data

    async def fleet(self, channel: grpc.aio.Channel | None) -> FleetView:
        return await _answer(RouterStub(_live(channel)).GetFleet(GetFleetRequest()))


def _live(channel: grpc.aio.Channel | None) -> grpc.aio.Channel:
    if channel is None:
        raise ServiceError(UNAVAILABLE, "no router can be reached", retry_after_s=1.0)
    return channel


async def _answer(call: Awaitable[T]) -> T:
    """A unary reply within CALL_S. Raises ServiceError UNAVAILABLE."""
    try:
        async with asyncio.timeout(CALL_S):
            return await call
    except (grpc.aio.AioRpcError, TimeoutError) as error:
        raise ServiceError(UNAVAILABLE, "the router does not answer", retry_after_s=1.0) from error
