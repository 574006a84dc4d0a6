"""Blobs, the files of a model (tokenizer, chat template, generation config), named by their
SHA-256: a cache, a gRPC service that serves them, and its client.

Invariant: a blob whose SHA-256 is not its name is never kept, served or returned.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from weakref import WeakValueDictionary

import grpc.aio

from pdserve.protos import common_pb2 as pb
from pdserve.protos import common_pb2_grpc
from pdserve.services.common.errors import ServiceError, abort
from pdserve.services.common.rpc.channel import may_be_closed

CHUNK_BYTES = 192 << 10
MAX_BLOB_BYTES = 256 << 20  # of one blob
BLOB_CACHE_BYTES = 512 << 20  # of all blobs in a process's cache
READ_S = 60.0  # for one blob
Fetch = Callable[[str], Awaitable[bytes | None]]


def blob_digest(data: bytes) -> str:
    """Return the digest by which a blob is named: its SHA-256 in hex; empty for empty data."""
    return hashlib.sha256(data).hexdigest() if data else ""


class BlobCache:
    """Keeps the most recently used blobs, at most `max_bytes` in total. A single blob may be larger
    than that; it is then the only one."""

    def __init__(self, max_bytes: float = float("inf")) -> None:
        self._max_bytes = max_bytes
        self._blobs: OrderedDict[str, bytes] = OrderedDict()  # the least recently used first
        self._num_bytes = 0
        # A lock is dropped with the last call that uses it.
        self._fetching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def add(self, data: bytes) -> None:
        """Keep a blob under its digest; ignore empty data."""
        digest = blob_digest(data)
        if not data or digest in self._blobs:
            return
        self._blobs[digest] = data
        self._num_bytes += len(data)
        while self._num_bytes > self._max_bytes and len(self._blobs) > 1:
            self._num_bytes -= len(self._blobs.popitem(last=False)[1])

    async def get(self, digest: str, fetch: Fetch | None = None) -> bytes | None:
        """Return the blob with this digest. If it is not in the cache, await `fetch` and keep the
        result; calls for the same digest fetch one after the other, so that the later ones find it
        in the cache.

        Returns None if the blob is not in the cache and cannot be fetched. Raises what `fetch`
        raises.
        """
        if digest not in self._blobs and fetch is not None:
            lock = self._fetching.setdefault(digest, asyncio.Lock())
            async with lock:
                if digest not in self._blobs:
                    self.add(await fetch(digest) or b"")
        if digest not in self._blobs:
            return None
        self._blobs.move_to_end(digest)
        return self._blobs[digest]


class BlobsServicer(common_pb2_grpc.BlobsServicer):
    """The gRPC service Blobs, whose method GetBlob streams a blob. `find` returns the blob of a
    digest, or None."""

    def __init__(self, find: Fetch) -> None:
        self._find = find

    async def GetBlob(self, request: pb.BlobRequest, context: Any) -> AsyncIterator[pb.BlobChunk]:
        data = await self._find(request.digest)
        if data is None:
            # The only code of the catalogue that maps to gRPC's NOT_FOUND.
            await abort(
                context, ServiceError(pb.MODEL_NOT_FOUND, "no file of the model has this digest")
            )
        for offset in range(0, len(data), CHUNK_BYTES):
            yield pb.BlobChunk(data=data[offset : offset + CHUNK_BYTES])


async def read_blob(channel: grpc.aio.Channel, digest: str) -> bytes:
    """Read the blob of a digest from a peer's BlobsServicer. Raises ServiceError UNAVAILABLE if the
    peer does not return it, or returns data with another digest."""
    data = bytearray()
    try:
        with may_be_closed():
            call = common_pb2_grpc.BlobsStub(channel).GetBlob(
                pb.BlobRequest(digest=digest), timeout=READ_S
            )
            async for chunk in call:
                data += chunk.data
                if len(data) > MAX_BLOB_BYTES:
                    call.cancel()
                    raise ServiceError(
                        pb.UNAVAILABLE,
                        "a model file (tokenizer, template or config) is too large: more than "
                        f"{MAX_BLOB_BYTES >> 20} MiB",
                    )
    except (grpc.aio.AioRpcError, ConnectionError) as error:
        raise ServiceError(
            pb.UNAVAILABLE,
            "a model file (tokenizer, template or config) cannot be read from a router or worker",
        ) from error
    if blob_digest(bytes(data)) != digest:
        raise ServiceError(
            pb.UNAVAILABLE,
            "a model file (tokenizer, template or config) does not match its digest",
        )
    return bytes(data)
