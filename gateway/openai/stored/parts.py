"""The parts of a gateway that need a database: the routes of files, batches and usage, the tasks
that run batches and delete old data, and their shutdown."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.types import ASGIApp

from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.batches import Batches, BatchRunner, FileLimits, Files, LineResponse, LineSlots
from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import HttpApi, HttpLimits
from pdserve.gateway.http.app import post
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.guard import caller_of
from pdserve.gateway.metrics.usage_log import UsageLog
from pdserve.gateway.openai.stored.routes import add_batch_routes, add_file_routes, add_usage_routes
from pdserve.gateway.settings import GatewaySettings
from pdserve.gateway.storage.database import Database
from pdserve.gateway.storage.responses import DatabaseResponses
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.tenants import ApiKeys, Tenant

log = logging.getLogger("pdserve.gateway.database")
EVERY_S = 3600.0
DAY_S = 86400
OPEN_AGAIN_S = 2.0  # before another try to open a database
FLUSH_S = 2.0  # to write the last counts
LINE_TRANSACTIONS = 4  # of batches at once: the others are for client requests


@dataclass(frozen=True, slots=True)
class StoredRoutes:
    """Adds the routes of files, batches and usage. `wake` is called when a batch is created or
    cancelled, so that the batch runner looks for work."""

    files: Files
    batches: Batches
    usage: UsageLog
    wake: Callable[[], None]

    def add_routes(
        self,
        app: FastAPI,
        api: HttpApi,
        limits: HttpLimits,
        bodies: BodyReader,
        count: Callable[[Caller], Awaitable[None]],
    ) -> None:
        """Add the routes to the application. `count` is called for each request to them; it raises
        ServiceError if the key exceeds its rate limit."""

        async def counted(request: Request) -> None:
            await count(caller_of(request))

        routes = APIRouter(dependencies=[Depends(counted)])
        add_file_routes(routes, api, self.files, limits)
        add_batch_routes(routes, api, self.batches, bodies, self.wake)
        add_usage_routes(routes, api, self.usage)
        app.router.routes.extend(routes.routes)  # an included router is hidden from the document


class Retention:
    """Deletes batches and usage that are older than a number of days. Several gateways with the
    same database may run it at once."""

    def __init__(self, batches: Batches, usage: UsageLog, days: int) -> None:
        """Set the age in days beyond which data is deleted; 0 keeps everything."""
        self._batches = batches
        self._usage = usage
        self._days = days

    async def run(self) -> None:
        """Delete old data once an hour, until cancelled. Returns at once if everything is kept."""
        while self._days:
            try:
                await self._batches.remove_ended(self._days * DAY_S)
                await self._usage.forget(self._days * DAY_S)
            except ServiceError as error:
                log.warning(
                    "cannot delete old batches and usage, retrying in an hour: %s", error.message
                )
            await asyncio.sleep(EVERY_S)


class StoredParts:
    """Files, batches, usage and stored responses of one gateway. Call `start`, then `run` as a
    task, and at the end `drain` and `close`."""

    def __init__(self, settings: GatewaySettings, keys: ApiKeys, limits: AdmissionLimits) -> None:
        """Create the parts without opening the database. Raises ValueError for an invalid database
        URL."""
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
        """Open the database if it is a file. Raises OSError if it cannot be opened; a retry would
        not help."""
        if self._db.is_file:
            await self._db.start()

    async def run(self, app: ASGIApp) -> None:
        """Run batches, write usage and delete old data until cancelled. `app` is the application
        that answers the requests in the lines of batches. If a database server is not reachable,
        retries until it is."""
        while not self._db.is_file:
            try:
                await self._db.start()
                break
            except OSError as error:
                log.error("%s", error)
                await asyncio.sleep(OPEN_AGAIN_S)

        async with asyncio.TaskGroup() as group:
            group.create_task(self._runner.run(partial(_answer_line, app)), name="batches")
            group.create_task(self.usage.run(), name="usage")
            group.create_task(self._retention.run(), name="retention")

    async def drain(self) -> None:
        """Finish the lines of batches that are running and begin no more. Other gateways may
        continue with the remaining lines."""
        await self._runner.drain()

    async def close(self) -> None:
        await self._runner.close()
        try:
            async with asyncio.timeout(FLUSH_S):
                await self.usage.flush()
        except (ServiceError, TimeoutError):
            log.warning("the usage of the last seconds is lost: the database did not record it")
        await self._db.close()


async def _answer_line(
    app: ASGIApp, path: str, body: bytes, tenant: Tenant, session: str
) -> LineResponse:
    """Send the request in one line of a batch to the application, and return the response."""
    reply = await post(app, path, body, tenant, session)
    retry_after_s = float(reply.headers.get("retry-after", "0"))
    return LineResponse(reply.request_id, reply.status, reply.body, retry_after_s)
