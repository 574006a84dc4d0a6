"""The parts that only a gateway with a database has, their tasks and their shutdown."""

import asyncio
import logging
import time

from starlette.types import ASGIApp

from pdserve.gateway.batches.batches import Batches
from pdserve.gateway.batches.files import FileLimits, Files
from pdserve.gateway.batches.run import Answer
from pdserve.gateway.batches.runner import BatchRunner
from pdserve.gateway.batches.slots import LineSlots
from pdserve.gateway.http.inner import post
from pdserve.gateway.limits import AdmissionLimits
from pdserve.gateway.observability.usage_log import UsageLog
from pdserve.gateway.openai.stored.retention import Retention
from pdserve.gateway.openai.stored.routes import StoredRoutes
from pdserve.gateway.settings import GatewaySettings
from pdserve.gateway.storage.database import Database
from pdserve.gateway.storage.responses import DatabaseResponses
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.tenants.keys import ApiKeys, Tenant

log = logging.getLogger("pdserve.gateway.database")

OPEN_AGAIN_S = 2.0  # before another try to open a database
FLUSH_S = 2.0  # to write the last counts
LINE_TRANSACTIONS = 4  # of batches at once: the others are for client requests


class StoredParts:
    """Files, batches, usage and kept responses of one gateway: `start`, then `run` as a task,
    `drain` and `close`."""

    def __init__(self, settings: GatewaySettings, keys: ApiKeys, limits: AdmissionLimits) -> None:
        """Raises ValueError for an invalid database URL."""
        self._db = Database(settings.database_url)
        file_limits = FileLimits(
            settings.max_file_bytes, settings.max_files_bytes, settings.max_files
        )
        files, batches = Files(self._db, file_limits), Batches(self._db)
        self.usage = UsageLog(self._db)
        lines = self._db.share(LINE_TRANSACTIONS)
        self._runner = BatchRunner(
            lines,
            Files(lines, file_limits),
            batches,
            LineSlots(settings.batch_concurrency, lambda: limits.waiting),
            keys.has_name,
            settings.max_body_bytes,
            self.usage.was_used,
        )
        self._retention = Retention(batches, self.usage, settings.retention_days)
        self.responses = DatabaseResponses(self._db, time.time)
        self.routes = StoredRoutes(files, batches, self.usage, self._runner.wake)

    async def start(self) -> None:
        """Open a database file. Raises OSError if it cannot be opened; retrying would not help."""
        if self._db.is_file:
            await self._db.start()

    async def run(self, app: ASGIApp) -> None:
        """Run batches, write usage and remove old data until cancelled; `app` answers lines
        (`post`). Waits for a database that is away."""
        while not self._db.is_file:
            try:
                await self._db.start()
                break
            except OSError as error:
                log.error("%s", error)
                await asyncio.sleep(OPEN_AGAIN_S)

        async def answer_line(endpoint: str, body: bytes, tenant: Tenant, session: str) -> Answer:
            reply = await post(app, endpoint, body, tenant, session)
            retry_after = reply.headers.get("retry-after", "0")
            return Answer(reply.request_id, reply.status, reply.body, float(retry_after))

        async with asyncio.TaskGroup() as group:
            group.create_task(self._runner.run(answer_line), name="batches")
            group.create_task(self.usage.run(), name="usage")
            group.create_task(self._retention.run(), name="retention")

    async def drain(self) -> None:
        """Finish the running lines and begin no more; other gateways may continue with the rest."""
        await self._runner.drain()

    async def close(self) -> None:
        await self._runner.close()
        try:
            async with asyncio.timeout(FLUSH_S):
                await self.usage.flush()
        except (ServiceError, TimeoutError):
            log.warning("the usage of the last few seconds was not recorded")
        await self._db.close()
