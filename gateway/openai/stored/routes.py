"""The routes of data in the database: files, batches and usage."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import APIRouter, Depends, FastAPI, Request

from pdserve.gateway.batches.batches import Batches
from pdserve.gateway.batches.files import Files
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.dialect import Dialect, HttpLimits
from pdserve.gateway.http.guard import caller_of
from pdserve.gateway.observability.usage_log import UsageLog
from pdserve.gateway.openai.stored.batches import add_batch_routes
from pdserve.gateway.openai.stored.files import add_file_routes
from pdserve.gateway.openai.stored.usage_report import add_usage_routes
from pdserve.gateway.requests.caller import Caller


@dataclass(frozen=True, slots=True)
class StoredRoutes:
    """The data of the routes; `wake` is called when a batch is created or cancelled."""

    files: Files
    batches: Batches
    usage: UsageLog
    wake: Callable[[], None]

    def add_routes(
        self,
        app: FastAPI,
        dialect: Dialect,
        limits: HttpLimits,
        bodies: BodyReader,
        count: Callable[[Caller], Awaitable[None]],
    ) -> None:
        """`count` is called for each request, and raises ServiceError beyond a key's rate."""

        async def counted(request: Request) -> None:
            await count(caller_of(request))

        routes = APIRouter(dependencies=[Depends(counted)])
        add_file_routes(routes, dialect, self.files, limits)
        add_batch_routes(routes, dialect, self.batches, bodies, self.wake)
        add_usage_routes(routes, dialect, self.usage)
        app.router.routes.extend(routes.routes)  # an included router is hidden from the document
