"""Ollama's API on the HTTP shell: its routes, its lines of JSON and its errors."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.responses import JSONResponse

from pdserve.gateway.http import (
    LINES,
    REQUEST_ID,
    BodyReader,
    EventStream,
    HttpError,
    HttpLimits,
    Reply,
    caller_of,
    described,
)
from pdserve.gateway.ollama.embeddings import embed
from pdserve.gateway.ollama.models import processes, show, tags
from pdserve.gateway.ollama.reply import OllamaReply, line, load
from pdserve.gateway.ollama.request_models import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaGeneration,
    OllamaShowBody,
    parse,
)
from pdserve.gateway.ollama.response_models import (
    OllamaChat,
    OllamaError,
    OllamaGenerated,
    OllamaModel,
    OllamaProcesses,
    OllamaTags,
    OllamaVector,
    OllamaVectors,
    OllamaVersion,
)
from pdserve.gateway.service import Service

API_VERSION = "0.12.11"  # the emulated version of Ollama; editors refuse versions before 0.6.4


class OllamaDialect:
    """/api/chat, /api/generate, /api/embed, /api/embeddings, /api/tags, /api/ps, /api/show and
    /api/version."""

    paths: tuple[str, ...] = ("/api/",)
    not_offered: tuple[str, ...] = tuple(
        f"/api/{route}/"
        for route in ("blobs", "copy", "create", "delete", "pull", "push", "me", "web_search",
                      "web_fetch")
    )  # fmt: skip
    statuses: Mapping[int, int] = MappingProxyType({})  # all as they are
    request_id_header: str = REQUEST_ID
    error_model: type[BaseModel] = OllamaError

    def __init__(self, service: Service, limits: HttpLimits, bodies: BodyReader) -> None:
        self._service = service
        self._limits = limits
        self._bodies = bodies

    def error_object(self, error: HttpError) -> dict[str, Any]:
        message = error.message
        if error.param and error.param not in message:
            message = f"{error.param}: {message}"
        return {"error": message}

    def error_event(self, error: HttpError) -> bytes:
        return line(self.error_object(error))

    def add_routes(self, app: FastAPI) -> None:
        service = self._service

        @app.post(
            "/api/chat",
            **described(OllamaChatBody, answer=OllamaChat, event=OllamaChat, stream=LINES),
        )
        async def chat(request: Request) -> Response:
            """Generate the next message of a conversation; without messages, load the model."""
            return self._answer(await self._read(request, OllamaChatBody), request)

        @app.post(
            "/api/generate",
            **described(
                OllamaGenerateBody, answer=OllamaGenerated, event=OllamaGenerated, stream=LINES
            ),
        )
        async def generate(request: Request) -> Response:
            """Answer one message, or continue a raw text; without a prompt, load the model."""
            return self._answer(await self._read(request, OllamaGenerateBody), request)

        @app.post("/api/embed", **described(OllamaEmbedBody, answer=OllamaVectors))
        async def embed_route(request: Request) -> Response:
            """Compute the embeddings of texts."""
            body = await self._read(request, OllamaEmbedBody)
            return Reply(embed(service, body, caller_of(request)), self)

        @app.post("/api/embeddings", **described(OllamaEmbeddingsBody, answer=OllamaVector))
        async def embeddings(request: Request) -> Response:
            """Compute the embedding of one text."""
            body = await self._read(request, OllamaEmbeddingsBody)
            return Reply(embed(service, body, caller_of(request)), self)

        @app.post("/api/show", **described(OllamaShowBody, answer=OllamaModel))
        async def show_route(request: Request) -> Response:
            """Describe a model."""
            body = await self._read(request, OllamaShowBody)
            return Reply(show(service, body.model or body.name or ""), self)

        @app.get("/api/tags", **described(answer=OllamaTags))
        async def tags_route() -> Response:
            """List the served models."""
            return JSONResponse(await tags(service))

        @app.get("/api/ps", **described(answer=OllamaProcesses))
        async def ps() -> Response:
            """List the loaded models; every served model is loaded."""
            return JSONResponse(await processes(service))

        @app.get("/api/version", **described(answer=OllamaVersion))
        async def version() -> Response:
            """Get the version of Ollama's API; /version returns that of the server."""
            return JSONResponse({"version": API_VERSION})

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        return await self._bodies.read(request, partial(parse, kind))

    def _answer(self, body: OllamaGeneration, request: Request) -> Response:
        caller, is_chat = caller_of(request), isinstance(body, OllamaChatBody)
        completion = body.request()
        if completion is None:
            return Reply(load(self._service, body.model or "", caller, is_chat=is_chat), self)
        reply = OllamaReply(self._service, completion, caller, is_chat=is_chat)
        if body.stream is False:
            return Reply(reply.whole(), self)
        return EventStream(reply.lines(), self, self._limits, media_type=LINES)
