"""Blobs of model cards by digest: fetched from any worker that names them, verified, cached.

Nothing is kept or passed on whose SHA-256 is not its name.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from pdserve.protos import common_pb2 as pb
from pdserve.protos.common_pb2_grpc import BlobsServicer, BlobsStub
from pdserve.services.host.channel import open_channel
from pdserve.services.router.fleet.fleet import Fleet

log = logging.getLogger(__name__)

CHUNK_BYTES = 192 << 10
MAX_BLOB_BYTES = 256 << 20
FETCH_S = 60.0


class BlobCache:
    """At most `capacity` bytes, least recently used first out."""

    def __init__(self, fleet: Fleet, secret: str, capacity: int = 512 << 20) -> None:
        self._fleet = fleet
        self._secret = secret
        self._capacity = capacity
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self._fetching: dict[str, asyncio.Lock] = {}

    async def get(self, digest: str) -> bytes | None:
        """The blob, or None if no worker has it; one fetch at a time per digest."""
        if digest in self._blobs:
            self._blobs.move_to_end(digest)
            return self._blobs[digest]
        addresses = self._holders(digest)
        if not addresses:
            return None
        async with self._fetching.setdefault(digest, asyncio.Lock()):
            for address in addresses if digest not in self._blobs else ():
                data = await self._fetch(address, digest)
                if data is not None:
                    self._keep(digest, data)
                    break
        self._fetching.pop(digest, None)
        return self._blobs.get(digest)

    def _holders(self, digest: str) -> list[str]:
        """Workers whose card names the digest; others are not asked for it."""
        found = []
        for worker in self._fleet.workers.values():
            card = worker.hello.card
            names = (card.tokenizer_digest, card.template_digest, card.generation_config_digest)
            if digest in names:
                found.append(worker.hello.address)
        return found

    async def _fetch(self, address: str, digest: str) -> bytes | None:
        data = bytearray()
        try:
            async with open_channel(address, self._secret) as channel:
                call = BlobsStub(channel).GetBlob(pb.BlobRequest(digest=digest), timeout=FETCH_S)
                async for chunk in call:
                    data += chunk.data
                    if len(data) > MAX_BLOB_BYTES:
                        log.error("blob %s of %s is too large", digest, address)
                        call.cancel()
                        return None
        except grpc.aio.AioRpcError as error:
            log.warning("blob %s from %s: %s", digest, address, error.details())
            return None
        if hashlib.sha256(data).hexdigest() != digest:
            log.error("blob from %s does not match its digest %s", address, digest)
            return None
        return bytes(data)

    def _keep(self, digest: str, data: bytes) -> None:
        self._blobs[digest] = data
        while len(self._blobs) > 1 and sum(map(len, self._blobs.values())) > self._capacity:
            self._blobs.popitem(last=False)


class BlobService(BlobsServicer):
    """Blobs.GetBlob for gateways."""

    def __init__(self, cache: BlobCache) -> None:
        self._cache = cache

    async def GetBlob(
        self, request: pb.BlobRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.BlobChunk]:
        data = await self._cache.get(request.digest)
        if data is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no worker has this blob")
            return
        for at in range(0, len(data), CHUNK_BYTES):
            yield pb.BlobChunk(data=data[at : at + CHUNK_BYTES])
