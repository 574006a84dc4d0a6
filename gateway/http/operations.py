"""Routes for operators: health, readiness, metrics and version of a gateway."""

import asyncio
import logging
import platform
from importlib import metadata
from typing import Literal

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import JSONResponse, PlainTextResponse

from pdserve.gateway.http.docs.document import described
from pdserve.gateway.http.guard import caller_of
from pdserve.gateway.observability.readiness import Readiness
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service
from pdserve.protos.common_pb2 import UNAVAILABLE
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.tenants.fair_semaphore import FairSemaphore

log = logging.getLogger("pdserve.gateway.http")

SCRAPE_PAUSE_S = 0.1  # between two metrics pages, each of which takes milliseconds to make
_YES_OR_NO = ("true", "false")
_FLEET = {
    "parameters": [
        {
            "name": "fleet",
            "in": "query",
            "required": False,
            "schema": {"enum": list(_YES_OR_NO)},
        }
    ]
}


class Health(BaseModel):
    status: Literal["ok"]


class Ready(BaseModel):
    status: Literal["ready"]
    models: list[str]


class Version(BaseModel):
    """The version of the server, as in vLLM, and the platform that the gateway runs on."""

    version: str = metadata.version("pdserve")
    python: str = platform.python_version()
    platform: str = f"{platform.system()}-{platform.machine()}".lower()


def add_operations(
    app: FastAPI, service: Service, readiness: Readiness, fleet_metrics: bool
) -> None:
    scraping = FairSemaphore(1)

    @app.get("/health", **described(answer=Health))
    async def health() -> Response:
        """Check that the gateway process is running."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready", **described(answer=Ready))
    async def ready() -> Response:
        """List the models that are ready to answer; 503 if none is."""
        status = await readiness.check()
        if not status.models:
            raise ServiceError(UNAVAILABLE, status.why_not, retry_after_s=1.0)
        return JSONResponse({"status": "ready", "models": status.models})

    @app.get("/version", **described(answer=Version))
    async def version() -> Response:
        """Get the version of the server."""
        return JSONResponse(Version().model_dump())

    @app.get("/metrics", response_class=PlainTextResponse, openapi_extra=_FLEET)
    async def metrics(request: Request) -> Response:
        """Export the gateway's metrics in Prometheus' text format; with `fleet=true`, also those of
        the whole fleet. The default of `fleet` is --fleet-metrics."""
        fleet = request.query_params.get("fleet", _YES_OR_NO[not fleet_metrics])
        if fleet not in _YES_OR_NO:
            raise refuse("fleet", "fleet must be true or false")
        async with scraping.turn(caller_of(request).tenant.id):
            page = await _metrics_page(service, fleet == "true")
            await asyncio.sleep(SCRAPE_PAUSE_S)
        return Response(page, media_type=CONTENT_TYPE_LATEST)


async def _metrics_page(service: Service, with_fleet: bool) -> bytes:
    if with_fleet:
        try:
            service.metrics.fleet.update(await service.upstream.fleet())
        except ServiceError as error:
            log.warning(
                "the fleet metrics are out of date: cannot read the fleet's state: %s",
                error.message,
            )
    service.metrics.show_open(service.limits)
    return await asyncio.to_thread(service.metrics.page, with_fleet)
