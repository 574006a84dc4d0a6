"""The blobs that a worker's model card names, in chunks."""

import hashlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from pdserve.protos import common_pb2 as pb
from pdserve.protos.common_pb2_grpc import BlobsServicer
from pdserve.services.host.errors import ServiceError, abort

CHUNK_BYTES = 192 << 10


def digest(data: bytes) -> str:
    """A blob's name; empty data has none."""
    return hashlib.sha256(data).hexdigest() if data else ""


class WorkerBlobs(BlobsServicer):
    """Blobs.GetBlob; knows nothing until the model is loaded."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def publish(self, blobs: Iterable[bytes]) -> None:
        self._blobs.update((digest(data), data) for data in blobs if data)

    async def GetBlob(self, request: pb.BlobRequest, context: Any) -> AsyncIterator[pb.BlobChunk]:
        data = self._blobs.get(request.digest)
        if data is None:
            # No code of the catalogue is NOT_FOUND but the model's.
            await abort(context, ServiceError(pb.MODEL_NOT_FOUND, "no blob of that digest here"))
        for at in range(0, len(data), CHUNK_BYTES):
            yield pb.BlobChunk(data=data[at : at + CHUNK_BYTES])
