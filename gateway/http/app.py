"""The HTTP shell: mounts the dialects, answers probes and metrics, and catches every error.

Invariant: nothing here knows an API. An error has the shape of the dialect whose path it hit.
"""

import logging
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from pdserve.gateway.http.dialect import Dialect, HttpError, dialect_of, error_response
from pdserve.gateway.http.guard import Guard
from pdserve.gateway.keys import ApiKeys
from pdserve.gateway.observability.readiness import Readiness
from pdserve.gateway.service import Service
from pdserve.protos.common_pb2 import UNAVAILABLE
from pdserve.services.host.errors import ServiceError

log = logging.getLogger("pdserve.gateway.http")


def create_app(
    dialects: Sequence[Dialect],
    service: Service,
    readiness: Readiness,
    keys: ApiKeys,
    open_metrics: bool = True,
) -> ASGIApp:
    """The ASGI application; `open_metrics` lets /metrics in without a key."""
    # No generated docs: with keys set, a route that is not listed here does not exist.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _add_errors(app, dialects)
    for dialect in dialects:
        dialect.add_routes(app)
    _add_operations(app, service, readiness)
    open_paths = ["/health", "/ready"]
    if open_metrics:
        open_paths.append("/metrics")
    return Guard(app, keys, open_paths, dialects)


def _add_operations(app: FastAPI, service: Service, readiness: Readiness) -> None:
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        models = await readiness.models()
        if not models:
            raise ServiceError(UNAVAILABLE, await readiness.why_not(), retry_after_s=1.0)
        return JSONResponse({"status": "ready", "models": models})

    @app.get("/metrics")
    async def metrics() -> Response:
        try:
            service.metrics.fleet.update(await service.upstream.fleet())
        except ServiceError as error:
            log.warning("metrics without a fresh view of the fleet: %s", error.message)
        service.metrics.open.labels("waiting").set(service.limits.waiting)
        service.metrics.open.labels("open").set(service.limits.open)
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI, dialects: Sequence[Dialect]) -> None:
    def respond(request: Request, error: HttpError) -> Response:
        return error_response(dialect_of(dialects, request.url.path), error)

    @app.exception_handler(ServiceError)
    @app.exception_handler(Exception)  # the server logs it as well
    async def service_error(request: Request, error: Exception) -> Response:
        return respond(request, HttpError.of(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        status, headers = error.status_code, dict(error.headers or {})
        what = f"{request.method} {request.url.path}"[:200]
        if status == 404:
            return respond(request, HttpError(404, f"unknown URL: {what}", "unknown_url"))
        if status == 405:
            message = f"method not allowed: {what}"
            found = HttpError(405, message, "method_not_allowed", headers=headers)
            return respond(request, found)
        # Whatever the client still sends is not read: the connection cannot go on.
        headers["connection"] = "close"
        return respond(request, HttpError(status, str(error.detail), headers=headers))
