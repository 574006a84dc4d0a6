"""Blobs of model cards by digest: read from any worker whose card names them, then cached."""

import logging

from pdserve.services.host.blobs import BLOB_CACHE_BYTES, BlobCache, read_blob
from pdserve.services.host.channel import open_channel
from pdserve.services.host.errors import ServiceError
from pdserve.services.router.fleet.fleet import Fleet

log = logging.getLogger(__name__)


class FleetBlobs:
    """The blobs of the models that live workers serve."""

    def __init__(self, fleet: Fleet, secret: str) -> None:
        self._fleet = fleet
        self._secret = secret
        self._cache = BlobCache(BLOB_CACHE_BYTES)

    async def get(self, digest: str) -> bytes | None:
        """The blob, or None if no worker has it."""
        return await self._cache.get(digest, self._fetch)

    async def _fetch(self, digest: str) -> bytes | None:
        for address in self._holders(digest):
            try:
                async with open_channel(address, self._secret) as channel:
                    return await read_blob(channel, digest)
            except ServiceError as error:
                log.warning("blob %s from %s: %s", digest, address, error)
        return None

    def _holders(self, digest: str) -> list[str]:
        """Workers whose card names the digest; others are not asked for it."""
        found = []
        for worker in self._fleet.workers.values():
            card = worker.hello.card
            names = (card.tokenizer_digest, card.template_digest, card.generation_config_digest)
            if digest in names:
                found.append(worker.hello.address)
        return found
