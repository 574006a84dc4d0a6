"""Removes ended batches with their files, and usage, once the operator wants them no longer."""

import asyncio
import logging

from pdserve.gateway.batches.batches import Batches
from pdserve.gateway.observability.usage_log import UsageLog
from pdserve.services.host.errors import ServiceError

log = logging.getLogger("pdserve.gateway.database")

EVERY_S = 3600.0
DAY_S = 86400


class Retention:
    """Every gateway of a database may have one: what one has removed the others do not find."""

    def __init__(self, batches: Batches, usage: UsageLog, days: int) -> None:
        """`days` 0: everything is kept."""
        self._batches = batches
        self._usage = usage
        self._days = days

    async def run(self) -> None:
        """Once an hour, until it is cancelled."""
        while self._days:
            try:
                await self._batches.remove_ended(self._days * DAY_S)
                await self._usage.forget(self._days * DAY_S)
            except ServiceError as error:
                log.warning("old batches and usage stay: %s", error.message)
            await asyncio.sleep(EVERY_S)
