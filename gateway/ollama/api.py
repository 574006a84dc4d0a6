"""Ollama's API as an HttpApi: its routes, its streams (one JSON object per line), its errors, and
the models that describe its responses. Durations are in nanoseconds."""

from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.responses import JSONResponse

from pdserve.gateway.http.api import HttpApi, HttpError, HttpLimits
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.docs import LINES, ResponseModel, describe
from pdserve.gateway.http.guard import caller_of
from pdserve.gateway.http.responses import EventStream, Reply
from pdserve.gateway.ollama.reply import OllamaReply, embed, line, load, processes, show, tags
from pdserve.gateway.ollama.request_models import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaGeneration,
    OllamaShowBody,
    parse,
)
from pdserve.gateway.openai import ScoredChatToken
from pdserve.gateway.service import Service


class OllamaError(ResponseModel):
    """The JSON body of every error response, and the last line of a stream that ends with an
    error."""

    error: str


class CalledOllamaFunction(ResponseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class CalledOllamaTool(ResponseModel):
    id: str
    function: CalledOllamaFunction


class OllamaAnswerMessage(ResponseModel):
    role: str
    content: str
    thinking: str | None = None
    tool_calls: list[CalledOllamaTool] | None = None


class OllamaProgress(ResponseModel):
    """The fields that answers of /api/chat and /api/generate share. `load_duration` is the time
    until the prompt was ready, `prompt_eval_duration` the time from then to the first token. In a
    stream only the last line has the counts and durations."""

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[ScoredChatToken] | None = None


class OllamaChat(OllamaProgress):
    """The answer of /api/chat, or one line of its stream."""

    message: OllamaAnswerMessage


class OllamaGenerated(OllamaProgress):
    """The answer of /api/generate, or one line of its stream."""

    response: str
    thinking: str | None = None
    tool_calls: list[CalledOllamaTool] | None = None


class OllamaDetails(ResponseModel):
    """Details of a model; a field is empty if its value is not known."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaTag(ResponseModel):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(ResponseModel):
    """The answer of /api/tags: the served models and their aliases."""

    models: list[OllamaTag]


class OllamaProcess(OllamaTag):
    """A loaded model in the answer of /api/ps. `expires_at` is in the year 9999, as models are
    never unloaded."""

    expires_at: str
    context_length: int


class OllamaProcesses(ResponseModel):
    """The answer of /api/ps: the loaded models, which are all served models."""

    models: list[OllamaProcess]


class OllamaModel(ResponseModel):
    """The answer of /api/show: the description of a model. `template` is its chat template, in
    jinja2."""

    modified_at: str
    template: str
    parameters: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaVersion(ResponseModel):
    version: str


class OllamaVectors(ResponseModel):
    """The answer of /api/embed: one vector for each text, normalized to length 1."""

    model: str
    embeddings: list[list[float]]
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None


class OllamaVector(ResponseModel):
    """The answer of /api/embeddings: the vector of the text, as the model returns it."""

    embedding: list[float]


API_VERSION = "0.12.11"  # the emulated version of Ollama; editors refuse versions before 0.6.4


class OllamaApi(HttpApi):
    """Ollama's API: /api/chat, /api/generate, /api/embed, /api/embeddings, /api/tags, /api/ps,
    /api/show and /api/version."""

    paths: tuple[str, ...] = ("/api/",)
    not_offered: tuple[str, ...] = tuple(
        f"/api/{route}/"
        for route in ("blobs", "copy", "create", "delete", "pull", "push", "me", "web_search",
                      "web_fetch")
    )  # fmt: skip
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
            **describe(OllamaChatBody, response=OllamaChat, event=OllamaChat, stream=LINES),
        )
        async def chat(request: Request) -> Response:
            """Generate the next message of a conversation. A request without messages generates
            nothing; clients send it to load the model."""
            return self._answer(await self._read(request, OllamaChatBody), request)

        @app.post(
            "/api/generate",
            **describe(
                OllamaGenerateBody, response=OllamaGenerated, event=OllamaGenerated, stream=LINES
            ),
        )
        async def generate(request: Request) -> Response:
            """Answer one message, or continue a raw text. A request without a prompt generates
            nothing; clients send it to load the model."""
            return self._answer(await self._read(request, OllamaGenerateBody), request)

        @app.post("/api/embed", **describe(OllamaEmbedBody, response=OllamaVectors))
        async def embed_route(request: Request) -> Response:
            """Compute the embeddings of texts."""
            body = await self._read(request, OllamaEmbedBody)
            return Reply(embed(service, body, caller_of(request)), self)

        @app.post("/api/embeddings", **describe(OllamaEmbeddingsBody, response=OllamaVector))
        async def embeddings(request: Request) -> Response:
            """Compute the embedding of one text."""
            body = await self._read(request, OllamaEmbeddingsBody)
            return Reply(embed(service, body, caller_of(request)), self)

        @app.post("/api/show", **describe(OllamaShowBody, response=OllamaModel))
        async def show_route(request: Request) -> Response:
            """Describe a model."""
            body = await self._read(request, OllamaShowBody)
            return Reply(show(service, body.model or body.name or ""), self)

        @app.get("/api/tags", **describe(response=OllamaTags))
        async def tags_route() -> Response:
            """List the served models."""
            return JSONResponse(await tags(service))

        @app.get("/api/ps", **describe(response=OllamaProcesses))
        async def ps() -> Response:
            """List the loaded models, which are all served models."""
            return JSONResponse(await processes(service))

        @app.get("/api/version", **describe(response=OllamaVersion))
        async def version() -> Response:
            """Get the version of Ollama whose API this server emulates. The server's own version is
            at /version."""
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
