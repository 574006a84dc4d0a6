"""OpenAI's API as an HttpApi: its routes, its server-sent events and its error format."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import Event, HttpApi, HttpLimits, JsonPieces, json_event
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.docs import describe
from pdserve.gateway.http.guard import caller_of
from pdserve.gateway.http.responses import DirectWrite, EventStream, Reply
from pdserve.gateway.openai.chat import ChatReply, chat_batch
from pdserve.gateway.openai.completions import CompletionReply
from pdserve.gateway.openai.embeddings import EmbeddingBody, EmbeddingReply
from pdserve.gateway.openai.objects import OpenAiErrors, data_event
from pdserve.gateway.openai.request_models import (
    B,
    ChatBatchBody,
    ChatBody,
    CompletionBody,
    parse,
)
from pdserve.gateway.openai.response_models import (
    ChatBatch,
    ChatCompletion,
    ChatCompletionChunk,
    EmbeddingList,
    ErrorObject,
    TextCompletion,
)
from pdserve.gateway.openai.responses import add_response_routes
from pdserve.gateway.openai.server_info import (
    add_server_routes,
)
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service
from pdserve.gateway.storage import ResponseStore

END = "[DONE]"  # the data of a stream's last event
DONE = f"data: {END}\n\n".encode()
PING = b": ping\n\n"  # a comment, which clients skip
# Routes that clients also look for without /v1.
SHORT = ("/chat/completions", "/completions", "/embeddings", "/models", "/responses")
STORED = ("/v1/files", "/v1/batches", "/v1/usage")


class DatabaseRoutes(Protocol):
    """Adds the routes that need a database: /v1/files, /v1/batches and /v1/usage."""

    def add_routes(
        self,
        app: FastAPI,
        api: HttpApi,
        limits: HttpLimits,
        bodies: BodyReader,
        count: Callable[[Caller], Awaitable[None]],
    ) -> None: ...


class OpenAiApi(OpenAiErrors, HttpApi):
    """OpenAI's API: /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings and
    /v1/models, each also without /v1; further routes of vLLM and llama.cpp; and, with a database,
    /v1/files, /v1/batches and /v1/usage."""

    paths: tuple[str, ...] = ("/v1/", "/tokenize", "/detokenize", *SHORT)
    not_offered: tuple[str, ...] = (
        "POST /v1/responses/compact",
        "DELETE /v1/models/",
        *(
            f"/v1/{route}/"
            for route in (
                "assistants", "audio", "chat/completions", "chatkit", "containers",
                "conversations", "edits", "engines", "evals", "fine-tunes", "fine_tuning",
                "images", "moderations", "organization", "realtime", "skills", "threads",
                "uploads", "vector_stores", "videos",
            )
        ),
    )  # fmt: skip

    error_model: type[BaseModel] = ErrorObject

    def __init__(
        self,
        service: Service,
        limits: HttpLimits,
        bodies: BodyReader,
        responses: ResponseStore | None = None,
        stored: DatabaseRoutes | None = None,
    ) -> None:
        """Create the API. Without `responses`, no responses are stored; without `stored`, the
        routes of files, batches and usage return an error."""
        self._responses = responses
        self._service = service
        self._limits = limits
        self._bodies = bodies
        self._stored = stored

    def add_routes(self, app: FastAPI) -> None:
        service = self._service

        @app.post(
            "/v1/chat/completions",
            **describe(ChatBody, response=ChatCompletion, event=ChatCompletionChunk, end=END),
        )
        async def chat(request: Request) -> Response:
            """Generate the next message of a conversation. A base model, which has no chat
            template, refuses it; use /v1/completions."""
            body = await self._read(request, ChatBody)
            return self._answer(ChatReply(service, body, caller_of(request)), body.stream)

        @app.post("/v1/chat/completions/batch", **describe(ChatBatchBody, response=ChatBatch))
        async def chat_batch_route(request: Request) -> Response:
            """Generate the next message of each of several conversations."""
            body = await self._read(request, ChatBatchBody)
            return Reply(chat_batch(service, body, caller_of(request)), self)

        add_response_routes(app, self, service, self._bodies, self._limits, self._responses)

        @app.post(
            "/v1/completions",
            **describe(CompletionBody, response=TextCompletion, event=TextCompletion, end=END),
        )
        async def completions(request: Request) -> Response:
            """Generate continuations of texts or token ids."""
            body = await self._read(request, CompletionBody)
            return self._answer(CompletionReply(service, body, caller_of(request)), body.stream)

        @app.post("/v1/embeddings", **describe(EmbeddingBody, response=EmbeddingList))
        async def embeddings(request: Request) -> Response:
            """Compute the embeddings of texts or token ids."""
            body = await self._read(request, EmbeddingBody)
            reply = EmbeddingReply(service, body, caller_of(request))
            return Reply(reply.whole(), self)

        add_server_routes(app, self, service, self._bodies)
        _add_short_paths(app)
        if self._stored is None:
            _add_refusals(app)
        else:
            self._stored.add_routes(app, self, self._limits, self._bodies, service.count)

    async def _read(self, request: Request, kind: type[B]) -> B:
        return await self._bodies.read(request, partial(parse, kind))

    def _answer(self, reply: ChatReply | CompletionReply, stream: bool | None) -> Response:
        if stream:
            direct = DirectWrite()
            events = _events(reply.chunks(direct))
            return EventStream(events, self, self._limits, direct, lambda: PING)
        return Reply(reply.whole(), self)


def _add_short_paths(app: FastAPI) -> None:
    """Add each route in SHORT a second time without /v1. The OpenAPI document lists only the path
    with /v1."""
    for route in [route for route in app.routes if isinstance(route, APIRoute)]:
        path = route.path.removeprefix("/v1")
        if path != route.path and f"{path}/".startswith(tuple(f"{short}/" for short in SHORT)):
            methods = sorted(route.methods or ())
            app.add_api_route(path, route.endpoint, methods=methods, include_in_schema=False)


def _add_refusals(app: FastAPI) -> None:
    """Add routes for files, batches and usage that return an error, on a server without a
    database."""

    async def refused() -> Response:
        raise refuse(
            "", "this server stores no files, batches or usage; they require --database-url"
        )

    for path in STORED:
        for route in (path, path + "/{rest:path}"):
            app.add_api_route(
                route, refused, methods=["GET", "POST", "DELETE"], include_in_schema=False
            )


async def _events(chunks: AsyncGenerator[Any, None]) -> AsyncGenerator[Event, None]:
    """Yield each chunk as a server-sent event, then the event `[DONE]`."""
    async with aclosing(chunks) as items:
        async for chunk in items:
            yield (
                json_event(b"data: ", chunk) if isinstance(chunk, JsonPieces) else data_event(chunk)
            )
    yield DONE
