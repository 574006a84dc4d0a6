"""The HTTP application: adds the routes of all APIs and those for operators (health, metrics,
traces), and converts every exception to an error response.

Invariant: this module knows no particular API. An error has the format of the API to which the URL
path belongs.
"""

import asyncio
import logging
import platform
import re
import uuid
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import metadata
from typing import Literal, NamedTuple

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import REQUEST_ID, HttpApi, HttpError, api_of, error_response
from pdserve.gateway.http.docs import FOLDER, ResponseModel, add_docs, describe
from pdserve.gateway.http.guard import Guard, caller_of
from pdserve.gateway.metrics import RequestSnapshot
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service
from pdserve.protos.common_pb2 import UNAVAILABLE
from pdserve.services.common.errors import ServiceError, quoted
from pdserve.services.common.fairness import FairSemaphore
from pdserve.services.common.tenants import ApiKeys, Tenant

log = logging.getLogger("pdserve.gateway.http")
PROBES = ("/health", "/health/live", "/health/ready", "/ready")  # routes that need no API key
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
    """The answer of /version: the version of the server, as in vLLM, and the Python version and
    platform on which the gateway runs."""

    version: str = metadata.version("pdserve")
    python: str = platform.python_version()
    platform: str = f"{platform.system()}-{platform.machine()}".lower()


def add_operations(
    app: FastAPI, service: Service, readiness: Readiness, fleet_metrics: bool
) -> None:
    scraping = FairSemaphore(1)

    @app.get("/health/live", **describe(response=Health))
    @app.get("/health", **describe(response=Health))
    async def health() -> Response:
        """Check that the gateway process is running."""
        return JSONResponse({"status": "ok"})

    @app.get("/health/ready", **describe(response=Ready))
    @app.get("/ready", **describe(response=Ready))
    async def ready() -> Response:
        """List the models that are ready to answer; 503 if none is."""
        status = await readiness.check()
        if not status.models:
            raise ServiceError(UNAVAILABLE, status.why_not, retry_after_s=1.0)
        return JSONResponse({"status": "ready", "models": status.models})

    @app.get("/version", **describe(response=Version))
    async def version() -> Response:
        """Get the version of the server."""
        return JSONResponse(Version().model_dump())

    @app.get("/metrics", response_class=PlainTextResponse, openapi_extra=_FLEET)
    async def metrics(request: Request) -> Response:
        """Export the gateway's metrics in Prometheus' text format; with `fleet=true`, also the
        metrics of the whole fleet. The option --fleet-metrics sets the default of `fleet`."""
        fleet = request.query_params.get("fleet", _YES_OR_NO[not fleet_metrics])
        if fleet not in _YES_OR_NO:
            raise refuse("fleet", "the URL parameter fleet must be true or false")
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


class TracePhase(ResponseModel):
    """One phase of a request, such as prefill or decode; `start_ms` counts from the arrival of the
    request."""

    name: str
    start_ms: float
    duration_ms: float


class TraceAttempt(ResponseModel):
    """One attempt to run the request: when it started and the workers that ran it. `prefill` is
    empty if the decode worker computes the prompt itself."""

    attempt: str
    start_ms: float
    decode: str
    prefill: str


class RequestTrace(ResponseModel):
    """The phases of one request. The phases before `decode` add up to `time_to_first_token_ms`,
    which counts from the arrival of the request's headers. While the request runs, phases that are
    not known yet are missing. `finish_reason` may be an error code."""

    id: str
    object: Literal["trace"] = "trace"
    trace_id: str | None
    model: str
    state: str
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    transport: str | None
    phases: list[TracePhase]
    attempts: list[TraceAttempt]
    time_to_first_token_ms: float | None
    total_ms: float


class FoundTrace(BaseModel):
    """The trace of a request found in one gateway process. `arrived` is the time at which the
    request arrived, by the clock of the process's host; of several traces, the latest is
    returned."""

    arrived: float
    trace: RequestTrace


def add_traces(app: FastAPI, service: Service, apis: Sequence[HttpApi]) -> None:
    """Add the route GET /v1/traces/{request_id}, which also queries the other gateway processes at
    the same port."""

    def local_trace(tenant: bytes, request_id: str) -> FoundTrace | None:
        state = service.requests.find(tenant, request_id)
        if state is None:
            return None
        return FoundTrace(arrived=state.arrived, trace=_trace_of(state))

    def answer(tenant: bytes, request_id: str) -> bytes:
        match = local_trace(tenant, request_id)
        return match.model_dump_json().encode() if match else b""

    service.processes.serve("trace", answer)

    @app.get("/v1/traces/{request_id:path}", **describe(response=RequestTrace))
    async def trace(request_id: str, request: Request) -> Response:
        """Get the duration of each phase of a recent request of this key. `request_id` is the
        response header `x-request-id`, or the `id` of the answer."""
        tenant = caller_of(request).tenant.id
        others = await service.processes.query("trace", tenant, request_id)
        traces = [local_trace(tenant, request_id), *map(FoundTrace.model_validate_json, others)]
        match = max(filter(None, traces), key=lambda item: item.arrived, default=None)
        if match is None:
            text = f"request not found: {quoted(request_id)}; only recent requests are kept"
            error = HttpError(404, text, "not_found", param="request_id")
            error = replace(error, request_id=caller_of(request).shown_id)
            return error_response(api_of(apis, request.url.path), error)
        headers = {"cache-control": "no-store"}
        page = match.trace.model_dump_json()
        return Response(page, media_type="application/json", headers=headers)


def _trace_of(state: RequestSnapshot) -> RequestTrace:
    first_s, is_local = state.first_token_s, state.prefill_at in ("", "local")
    return RequestTrace(
        id=state.request_id,
        trace_id=state.trace_id or None,
        model=state.model,
        state=state.phase,
        finish_reason=state.finish or None,
        prompt_tokens=state.prompt_tokens,
        cached_tokens=state.cached_tokens,
        completion_tokens=state.generated_tokens,
        transport=None if is_local else state.prefill_at,
        phases=[
            TracePhase(name=item.name, start_ms=_ms(item.start_s), duration_ms=_ms(item.duration_s))
            for item in state.timeline()
        ],
        attempts=[
            TraceAttempt(
                attempt=item.attempt.hex(),
                start_ms=_ms(state.receive_s + item.at_s),
                decode=item.decode,
                prefill=item.prefill,
            )
            for item in state.attempts
        ],
        time_to_first_token_ms=None if first_s is None else _ms(state.receive_s + first_s),
        total_ms=_ms(state.receive_s + state.elapsed_s),
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


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
    apis: Sequence[HttpApi],
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
    """Return the ASGI application of the gateway: the routes behind the Guard.

    `open_metrics` makes /metrics accessible without a key; so are `open_paths`. `local` and
    `allowed_origins` are passed to the Guard; web pages of the allowed origins get CORS headers.
    `root_path` is the path prefix under which a reverse proxy publishes the application. `routes`
    are those of `create_routes`, if the caller has created them already. Raises ValueError for an
    invalid root path.
    """
    root_path = root_path.rstrip("/")
    if root_path and not _ROOT.fullmatch(root_path):
        raise ValueError(
            f"--root-path: {root_path!r} must start with / and have only letters, digits and /._~-"
        )
    app = routes or create_routes(apis, service, readiness)
    metrics_paths = ["/metrics"] if open_metrics else []
    open_routes = [*PROBES, *open_paths, *metrics_paths]
    docs_paths = add_docs(app, apis, root_path, keys.required, open_routes)
    paths = [path for api in apis for path in api.paths]
    paths += [route.path for route in app.routes if isinstance(route, Route)]
    if root_path and any(f"{path}/".startswith(f"{root_path}/") for path in paths):
        raise ValueError(
            f"--root-path: {root_path} is a prefix of the server's own routes; choose another"
        )
    guard = _normalize(
        Guard(app, keys, [*open_routes, *docs_paths], apis, local, allowed_origins), root_path
    )
    if not allowed_origins:
        return guard
    return CORSMiddleware(  # outside, so that a page can read why it is refused
        guard,
        allow_origins=allowed_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=sorted({REQUEST_ID, *(api.request_id_header for api in apis), *EXPOSED}),
    )


def create_routes(
    apis: Sequence[HttpApi],
    service: Service,
    readiness: Readiness,
    fleet_metrics: bool = True,
) -> FastAPI:
    """Return the application with all routes, without the Guard's checks. `fleet_metrics` is the
    default of the parameter `fleet` of /metrics: whether the page includes the fleet's metrics."""
    # Without FastAPI's docs: their pages load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _add_errors(app, apis)
    for api in apis:
        api.add_routes(app)
    add_operations(app, service, readiness, fleet_metrics)
    add_traces(app, service, apis)
    return app


def _normalize(app: ASGIApp, root_path: str) -> ASGIApp:
    """Wrap an application so that it gets normalized requests: HEAD becomes GET (the server leaves
    out the body), and the path loses a reverse proxy's `root_path` at its beginning and a slash at
    its end, except for the path FOLDER."""

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


def _add_errors(app: FastAPI, apis: Sequence[HttpApi]) -> None:
    def respond(request: Request, error: HttpError) -> Response:
        error = replace(error, request_id=caller_of(request).shown_id)
        return error_response(api_of(apis, request.url.path), error)

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
        if request_path.startswith(api_of(apis, path).not_offered):
            message = f"{target} is not offered by this server"
            return respond(request, HttpError(404, message, "unknown_url"))
        if status == 404:
            return respond(request, HttpError(404, f"unknown URL: {target}", "unknown_url"))
        if status == 405:
            message = f"method not allowed: {target}"
            not_allowed = HttpError(405, message, "method_not_allowed", headers=headers)
            return respond(request, not_allowed)
        return respond(request, HttpError(status, str(error.detail), headers=headers))


class InnerReply(NamedTuple):
    """A complete response of the application to a request that the gateway made itself (`post`)."""

    request_id: str
    status: int
    headers: Headers
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes, tenant: Tenant, session: str) -> InnerReply:
    """Send a POST request with a JSON body to the application from within the process, e.g. for a
    line of a batch, and return the whole response.

    `app` has the routes without the Guard, so the caller of this function chooses the tenant.
    Routes, limits and errors are the same as for a client's request. The request runs with
    background priority (`Caller.background`).
    """
    request_id = uuid.uuid4().hex
    pending = [body]
    start: Message = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        await asyncio.Event().wait()  # this client never leaves; the waiter is cancelled
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))

    with ExitStack() as at_end, suppress(Exception):  # the application has answered and logged it
        caller = Caller(
            request_id,
            tenant=tenant,
            at_end=at_end,
            session=session,
            background=True,
            route=f"POST {path}",
        )
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": None,
            "server": None,
            "state": {"caller": caller},
        }
        await app(scope, receive, send)
    headers = Headers(raw=start.get("headers", []))
    return InnerReply(request_id, start.get("status", 500), headers, b"".join(parts))
