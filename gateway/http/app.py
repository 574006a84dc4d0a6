"""The HTTP shell: mounts the dialects and the operations, and catches every error.

Invariant: the shell knows no API. An error has the shape of the dialect whose path it hit.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.gateway.http.api import REQUEST_ID, Dialect, HttpError, dialect_of, error_response
from pdserve.gateway.http.docs import FOLDER, add_docs
from pdserve.gateway.http.guard import Guard, caller_of
from pdserve.gateway.http.operations import add_operations, add_traces
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.service import Service
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.tenants import ApiKeys

_ROOT = re.compile(r"(/[A-Za-z0-9._~-]+)+")

# Response headers that pages of allowed origins may read, besides the ids of requests.
EXPOSED = (
    "retry-after",
    "traceparent",
    *(
        f"x-ratelimit-{figure}-{unit}"
        for figure in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)


def create_app(
    dialects: Sequence[Dialect],
    service: Service,
    readiness: Readiness,
    keys: ApiKeys,
    open_metrics: bool = False,
    local: bool = False,
    allowed_origins: Sequence[str] = (),
    root_path: str = "",
    routes: FastAPI | None = None,
    open_paths: Collection[str] = (),
) -> ASGIApp:
    """Return the ASGI application. `open_metrics` lets /metrics in without a key, like
    `open_paths`. `local` and `allowed_origins` are the Guard's; pages of the allowed origins get
    CORS headers. `root_path` is where a proxy shows the application. `routes` are those of
    `create_routes`, if they are made already. Raises ValueError for an invalid root path."""
    root_path = root_path.rstrip("/")
    if root_path and not _ROOT.fullmatch(root_path):
        raise ValueError(
            f"--root-path: {root_path!r} must start with / and have only letters, digits and /._~-"
        )
    app = routes or create_routes(dialects, service, readiness)
    add_docs(app, dialects, root_path, keys.required)
    paths = [path for d in dialects for path in d.paths]
    paths += [route.path for route in app.routes if isinstance(route, Route)]
    if root_path and any(f"{path}/".startswith(f"{root_path}/") for path in paths):
        raise ValueError(f"--root-path: {root_path} is a prefix of the server's own routes")
    open_routes = ["/health", "/ready", *open_paths, *(["/metrics"] if open_metrics else [])]
    guard = _normalize(Guard(app, keys, open_routes, dialects, local, allowed_origins), root_path)
    if not allowed_origins:
        return guard
    return CORSMiddleware(  # outside, so that a page can read why it is refused
        guard,
        allow_origins=allowed_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=sorted({REQUEST_ID, *(d.request_id_header for d in dialects), *EXPOSED}),
    )


def create_routes(
    dialects: Sequence[Dialect],
    service: Service,
    readiness: Readiness,
    fleet_metrics: bool = True,
) -> FastAPI:
    """Return the routes behind the Guard; `fleet_metrics`: /metrics includes the fleet."""
    # Without FastAPI's docs: their pages load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _add_errors(app, dialects)
    for dialect in dialects:
        dialect.add_routes(app)
    add_operations(app, service, readiness, fleet_metrics)
    add_traces(app, service, dialects)
    return app


def _normalize(app: ASGIApp, root_path: str) -> ASGIApp:
    """Handle a HEAD request as GET; the server leaves out the body. Ignore a slash at a path's end,
    except in FOLDER, and a proxy's `root_path` at its beginning."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = dict(scope)  # the server's own scope keeps what the client sent
            if scope["method"] == "HEAD":
                scope["method"] = "GET"
            path = scope["path"]
            if root_path and f"{path}/".startswith(f"{root_path}/"):
                path = path.removeprefix(root_path)
            scope["path"] = path if path == FOLDER else path.rstrip("/") or "/"
        await app(scope, receive, send)

    return call


def _add_errors(app: FastAPI, dialects: Sequence[Dialect]) -> None:
    def respond(request: Request, error: HttpError) -> Response:
        error = replace(error, request_id=caller_of(request).shown_id)
        return error_response(dialect_of(dialects, request.url.path), error)

    @app.exception_handler(ServiceError)
    @app.exception_handler(Exception)  # the server logs it as well
    async def service_error(request: Request, error: Exception) -> Response:
        return respond(request, HttpError.of(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        status, headers = error.status_code, dict(error.headers or {})
        path = request.url.path
        target = f"{request.method} {path}"[:200]
        # With 405, another method's route has the path.
        request_path = {404: f"{path}/", 405: f"{request.method} {path}"}.get(status, "")
        if request_path.startswith(dialect_of(dialects, path).not_offered):
            message = f"{target} is not offered by this server"
            return respond(request, HttpError(404, message, "unknown_url"))
        if status == 404:
            return respond(request, HttpError(404, f"unknown URL: {target}", "unknown_url"))
        if status == 405:
            message = f"method not allowed: {target}"
            not_allowed = HttpError(405, message, "method_not_allowed", headers=headers)
            return respond(request, not_allowed)
        return respond(request, HttpError(status, str(error.detail), headers=headers))
