"""The blob cache and its client: which blobs are kept, fetched once, or refused."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from systems.cluster_secret import ACCESS, open_channel

from pdserve.protos import common_pb2 as pb
from pdserve.protos import common_pb2_grpc
from pdserve.protos.common_pb2_grpc import add_BlobsServicer_to_server
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import BlobCache, BlobsServicer, blob_digest, read_blob
from pdserve.services.common.rpc import blobs as module
from pdserve.services.common.server import GrpcServer

pytestmark = pytest.mark.anyio

A, B, C = b"a" * 10, b"b" * 10, b"c" * 10


async def has(cache: BlobCache, *blobs: bytes) -> list[bool]:
    return [await cache.get(blob_digest(blob)) is not None for blob in blobs]


async def test_the_least_recently_used_blob_is_evicted_first() -> None:
    cache = BlobCache(max_bytes=25)
    cache.add(A)
    cache.add(B)
    assert await cache.get(blob_digest(A)) == A
    cache.add(C)
    assert await has(cache, A, B, C) == [True, False, True]
    cache.add(b"d" * 100)
    assert await has(cache, A, C, b"d" * 100) == [False, False, True]


async def test_empty_data_is_no_blob() -> None:
    cache = BlobCache()
    cache.add(b"")
    assert await cache.get("") is None
    assert blob_digest(b"") == ""


async def test_a_blob_is_fetched_once_and_kept_under_its_own_name() -> None:
    cache, calls = BlobCache(), []

    async def fetch(digest: str) -> bytes | None:
        calls.append(digest)
        await asyncio.sleep(0)
        return A if digest == blob_digest(A) else B

    found = await asyncio.gather(*(cache.get(blob_digest(A), fetch) for _ in range(3)))
    assert found == [A] * 3
    assert calls == [blob_digest(A)]
    assert await cache.get(blob_digest(C), fetch) is None, "other bytes than requested"


async def test_a_failed_fetch_is_retried() -> None:
    cache = BlobCache()

    async def fails(digest: str) -> bytes | None:
        raise ServiceError(pb.UNAVAILABLE, "no")

    async def finds(digest: str) -> bytes | None:
        return A

    with pytest.raises(ServiceError, match="no"):
        await cache.get(blob_digest(A), fails)
    assert await cache.get(blob_digest(A), finds) == A


class Liar(common_pb2_grpc.BlobsServicer):
    """Sends other bytes than requested."""

    async def GetBlob(self, request: Any, context: Any) -> AsyncIterator[pb.BlobChunk]:
        yield pb.BlobChunk(data=A)
        yield pb.BlobChunk(data=B)


async def reading(servicer: Any, digest: str) -> bytes:
    host = GrpcServer(ACCESS)
    add_BlobsServicer_to_server(servicer, host.server)
    port = host.listen("127.0.0.1:0")
    await host.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            return await read_blob(channel, digest)
    finally:
        await host.stop(0)


async def test_a_blob_travels_in_chunks_and_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BlobCache()
    large = bytes(range(256)) * 2000
    cache.add(large)
    assert await reading(BlobsServicer(cache.get), blob_digest(large)) == large
    with pytest.raises(ServiceError, match="cannot be read"):
        await reading(BlobsServicer(cache.get), blob_digest(A))
    with pytest.raises(ServiceError, match="does not match its digest"):
        await reading(Liar(), blob_digest(A))
    monkeypatch.setattr(module, "MAX_BLOB_BYTES", len(large) - 1)
    with pytest.raises(ServiceError, match="too large"):
        await reading(BlobsServicer(cache.get), blob_digest(large))
