"""Blobs of model cards by digest: read from any worker whose card names them, then cached."""

import logging

from pdserve.protos.fleet_pb2 import DECODE
from pdserve.services.common.auth import Access, Role
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import BLOB_CACHE_BYTES, BlobCache, read_blob
from pdserve.services.router.fleet.fleet import Fleet

log = logging.getLogger(__name__)


class FleetBlobs:
    """The blobs of the models that live workers serve."""

    def __init__(self, fleet: Fleet, access: Access) -> None:
        self._fleet = fleet
        self._access = access
        self._cache = BlobCache(BLOB_CACHE_BYTES)

    async def get(self, digest: str) -> bytes | None:
        """Return the blob, or None if no worker has it."""
        return await self._cache.get(digest, self._fetch)

    async def _fetch(self, digest: str) -> bytes | None:
        for address, role in self._holders(digest):
            try:
                async with self._access.open_channel(address, role) as channel:
                    return await read_blob(channel, digest)
            except (ServiceError, OSError) as error:
                log.warning("cannot read blob %s from worker %s: %s", digest, address, error)
        return None

    def _holders(self, digest: str) -> list[tuple[str, Role]]:
        """Return the workers whose card names the digest."""
        holders = []
        for worker in self._fleet.workers.values():
            card = worker.hello.card
            names = (card.tokenizer_digest, card.template_digest, card.generation_config_digest)
            if digest in names:
                role = Role.DECODE if worker.hello.role == DECODE else Role.PREFILL
                holders.append((worker.hello.address, role))
        return holders
