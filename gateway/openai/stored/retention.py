"""Removes ended batches with their files, and usage, after the operator's retention period."""

import asyncio
import logging

from pdserve.gateway.batches.batches import Batches
from pdserve.gateway.observability.usage_log import UsageLog
from pdserve.services.host.errors import ServiceError

log = logging.getLogger("pdserve.gateway.database")

EVERY_S = 3600.0
DAY_S = 86400


class Retention:
    """Retention task; every gateway of a database may run one, and each row is removed once."""

    def __init__(self, batches: Batches, usage: UsageLog, days: int) -> None:
        """`days` 0: keep everything."""
        self._batches = batches
        self._usage = usage
        self._days = days

    async def run(self) -> None:
        """Remove old data once an hour, until cancelled."""
        while self._days:
            try:
                await self._batches.remove_ended(self._days * DAY_S)
                await self._usage.forget(self._days * DAY_S)
            except ServiceError as error:
                log.warning(
                    "cannot delete old batches and usage, retrying in an hour: %s", error.message
                )
            await asyncio.sleep(EVERY_S)
