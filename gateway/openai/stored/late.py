"""Creates the database parts of a gateway (files, batches, usage, stored responses) while it
already serves requests, since importing SQLAlchemy takes as long as all other imports.

They are created when a model is ready, or when a client first needs them. Until then, requests for
them wait, and the usage of keys is held in memory.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import HttpApi, HttpLimits
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.docs import DOCUMENT
from pdserve.gateway.metrics import RequestUsage
from pdserve.gateway.openai.api import STORED
from pdserve.gateway.settings import GatewaySettings
from pdserve.gateway.storage import KeptResponse, check_url
from pdserve.services.common.tenants import ApiKeys

if TYPE_CHECKING:
    from pdserve.gateway.openai.stored.parts import StoredParts

log = logging.getLogger("pdserve.gateway.database")

MAX_EARLY_USAGE = 100_000  # requests whose usage waits for the database; more is lost
WAITING = (*STORED, DOCUMENT)  # the document describes all routes


class LateParts:
    """Placeholder for a gateway's StoredParts until they exist: waits for them and passes calls on,
    as its DatabaseRoutes, ResponseStore and CountUsage. `run` is the task that creates and runs
    them; `drain` and `close` end them."""

    def __init__(
        self,
        settings: GatewaySettings,
        keys: ApiKeys,
        limits: AdmissionLimits,
        on_made: Callable[[], None] = lambda: None,
    ) -> None:
        """Check the database URL; nothing is created yet. `on_made` is called on a thread after the
        parts are created. Raises ValueError for an invalid database URL, OSError for a file that
        cannot be written."""
        check_url(settings.database_url)
        self._on_made = on_made
        self._make_parts = partial(_make_parts, settings, keys, limits)
        self._add_routes: list[Callable[[StoredParts], None]] = []
        self._early_usage: list[tuple[Caller, str, RequestUsage]] = []
        self._num_lost = 0  # beyond MAX_EARLY_USAGE
        self._requested = asyncio.Event()
        self._ready = asyncio.Event()
        self._parts: StoredParts | None = None

    def request(self) -> None:
        """Tell `run` to create the parts, if it has not begun to."""
        self._requested.set()

    async def run(self, app: ASGIApp) -> None:
        """Wait for `request`, create the parts, and run them until cancelled. Raises OSError if the
        database file is not a database; a retry would not help."""
        await self._requested.wait()
        parts = await asyncio.to_thread(self._make_parts)
        await asyncio.to_thread(self._on_made)
        await parts.start()
        for add_route in self._add_routes:
            add_route(parts)
        for usage in self._early_usage:
            parts.usage.count(*usage)
        self._early_usage.clear()
        self._warn_of_lost()
        self._parts = parts
        self._ready.set()
        await parts.run(app)

    async def parts(self) -> "StoredParts":
        """Request the parts, wait until they exist, and return them."""
        self.request()
        await self._ready.wait()
        assert self._parts is not None
        return self._parts

    async def drain(self) -> None:
        """Wait for the work of the parts, and for the parts themselves if usage waits for them."""
        if self._early_usage:
            await self.parts()
        if self._parts is not None:
            await self._parts.drain()

    async def close(self) -> None:
        if self._parts is not None:
            await self._parts.close()
        else:
            self._num_lost += len(self._early_usage)
            self._warn_of_lost()

    def _warn_of_lost(self) -> None:
        if self._num_lost:
            log.warning(
                "the usage of %d requests was not recorded: the database was not ready",
                self._num_lost,
            )

    def count(self, caller: Caller, model: str, usage: RequestUsage) -> None:
        if self._parts is not None:
            self._parts.usage.count(caller, model, usage)
        elif len(self._early_usage) < MAX_EARLY_USAGE:
            self._early_usage.append((caller, model, usage))
        else:
            self._num_lost += 1

    def add_routes(
        self,
        app: FastAPI,
        api: HttpApi,
        limits: HttpLimits,
        bodies: BodyReader,
        count: Callable[[Caller], Awaitable[None]],
    ) -> None:
        self._add_routes.append(
            lambda parts: parts.routes.add_routes(app, api, limits, bodies, count)
        )
        app.add_middleware(_WaitForParts, late=self)

    async def save(self, tenant: bytes, kept: KeptResponse) -> bool:
        return await (await self.parts()).responses.save(tenant, kept)

    async def find(self, tenant: bytes, name: str) -> KeptResponse | None:
        return await (await self.parts()).responses.find(tenant, name)

    async def remove(self, tenant: bytes, name: str) -> bool:
        return await (await self.parts()).responses.remove(tenant, name)


class _WaitForParts:
    """ASGI middleware that holds requests to database routes, and to /openapi.json, until the
    database parts exist."""

    def __init__(self, app: ASGIApp, late: LateParts) -> None:
        self._app = app
        self._late = late

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(WAITING):
            await self._late.parts()
        await self._app(scope, receive, send)


def _make_parts(settings: GatewaySettings, keys: ApiKeys, limits: AdmissionLimits) -> "StoredParts":
    from pdserve.gateway.openai.stored.parts import StoredParts

    return StoredParts(settings, keys, limits)
