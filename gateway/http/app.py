"""The REST application: its routes and how each error becomes an OpenAI error object.

Invariant: nothing here knows how an answer is made; a route reads, checks and hands over.
"""

import logging
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from pdserve.gateway.http.body import read_json
from pdserve.gateway.http.guard import Guard
from pdserve.gateway.http.replies import EventStream, Reply
from pdserve.gateway.keys import ApiKeys
from pdserve.gateway.observability.readiness import Readiness
from pdserve.gateway.openai.chat import ChatReply
from pdserve.gateway.openai.completions import CompletionReply
from pdserve.gateway.openai.errors import error_response, internal_error, service_error_response
from pdserve.gateway.openai.models import model_object
from pdserve.gateway.openai.schema import (
    B,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
)
from pdserve.gateway.openai.tokens import detokenize, tokenize
from pdserve.gateway.service import Service
from pdserve.protos.common_pb2 import UNAVAILABLE
from pdserve.services.host.errors import ServiceError

log = logging.getLogger("pdserve.gateway.http")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds on what a client may send, and on how slowly it may send and read."""

    max_body_bytes: int
    body_timeout_s: float
    max_buffer_bytes: int
    stall_s: float


def create_app(
    service: Service,
    readiness: Readiness,
    keys: ApiKeys,
    limits: HttpLimits,
    open_metrics: bool = True,
) -> ASGIApp:
    """The ASGI application; `open_metrics` lets /metrics in without a key."""
    # No generated docs: with keys set, a route that is not listed here does not exist.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _add_errors(app)
    _add_completions(app, service, limits)
    _add_models(app, service)
    _add_operations(app, service, readiness)
    open_paths = ["/health", "/ready"]
    if open_metrics:
        open_paths.append("/metrics")
    return Guard(app, keys, open_paths)


def _add_completions(app: FastAPI, service: Service, limits: HttpLimits) -> None:
    async def read(request: Request, kind: type[B]) -> B:
        return parse(kind, await read_json(request, limits.max_body_bytes, limits.body_timeout_s))

    def ids(request: Request) -> tuple[str, str]:
        """What its answer is named by, and the name that its client gave it, if any."""
        return request.state.request_id, request.state.client_id

    def answer(work: ChatReply | CompletionReply, stream: bool | None) -> Response:
        if stream:
            return EventStream(work.chunks(), limits.max_buffer_bytes, limits.stall_s)
        return Reply(work.whole(), limits.stall_s)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read(request, ChatBody)
        return answer(ChatReply(service, body, *ids(request)), body.stream)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read(request, CompletionBody)
        return answer(CompletionReply(service, body, *ids(request)), body.stream)

    @app.post("/tokenize")
    async def tokenize_route(request: Request) -> Response:
        return Reply(tokenize(service, await read(request, TokenizeBody)), limits.stall_s)

    @app.post("/detokenize")
    async def detokenize_route(request: Request) -> Response:
        return Reply(detokenize(service, await read(request, DetokenizeBody)), limits.stall_s)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        cards = await service.catalog.cards()
        data = [model_object(card) for card in sorted(cards, key=lambda card: card.name)]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(model_object(await service.catalog.card(name)))


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


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> Response:
        return service_error_response(error)

    @app.exception_handler(Exception)  # the server logs it as well
    async def unforeseen(request: Request, error: Exception) -> Response:
        return service_error_response(internal_error())

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        what = f"{request.method} {request.url.path}"[:200]
        if error.status_code == 404:
            return error_response(f"unknown URL: {what}", 404, code="unknown_url")
        if error.status_code == 405:
            message = f"method not allowed: {what}"
            return error_response(message, 405, code="method_not_allowed", headers=headers)
        # Whatever the client still sends is not read: the connection cannot go on.
        headers["connection"] = "close"
        return error_response(str(error.detail), error.status_code, headers=headers)
