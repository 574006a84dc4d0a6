"""Anthropic's API on the HTTP shell: its routes, its server-sent events and its errors."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from pdserve.engine.api import CONTEXT_EXCEEDED
from pdserve.gateway.anthropic.reply import MessageReply, count_tokens, framed
from pdserve.gateway.anthropic.request_models import (
    CountBody,
    MessagesBody,
    parse_count,
    parse_messages,
)
from pdserve.gateway.anthropic.response_models import (
    MessageEvent,
    MessageObject,
    MessagesError,
    TokenCount,
)
from pdserve.gateway.http import (
    BodyReader,
    EventStream,
    HttpError,
    HttpLimits,
    Reply,
    caller_of,
    described,
)
from pdserve.gateway.service import Service

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
PING = framed({"type": "ping"})


class AnthropicDialect:
    """/v1/messages and /v1/messages/count_tokens, for any `anthropic-version`."""

    paths: tuple[str, ...] = ("/v1/messages",)
    not_offered: tuple[str, ...] = ("/v1/messages/batches/",)
    statuses: Mapping[int, int] = MappingProxyType({503: 529})
    request_id_header: str = "request-id"
    error_model: type[BaseModel] = MessagesError

    def __init__(self, service: Service, limits: HttpLimits, bodies: BodyReader) -> None:
        self._service = service
        self._limits = limits
        self._bodies = bodies

    def error_object(self, error: HttpError) -> dict[str, Any]:
        default_type = "api_error" if error.status >= 500 else "invalid_request_error"
        message = error.message
        if error.code == "context_length_exceeded":
            message = _overflow(message)
        elif error.param and error.param not in message:
            message = f"{error.param}: {message}"
        return {
            "type": "error",
            "error": {"type": _TYPES.get(error.status, default_type), "message": message},
            "request_id": error.request_id or None,
        }

    def error_event(self, error: HttpError) -> bytes:
        return framed(self.error_object(error))

    def add_routes(self, app: FastAPI) -> None:
        service = self._service

        @app.post(
            "/v1/messages", **described(MessagesBody, answer=MessageObject, event=MessageEvent)
        )
        async def messages(request: Request) -> Response:
            """Generate the next message of a conversation."""
            caller = caller_of(request)
            body = await self._bodies.read(request, parse_messages)
            reply = MessageReply(service, body, caller)
            if body.stream:
                return EventStream(reply.framed(), self, self._limits, ping=lambda: PING)
            return Reply(reply.whole(), self)

        @app.post("/v1/messages/count_tokens", **described(CountBody, answer=TokenCount))
        async def count(request: Request) -> Response:
            """Count the tokens of a message's prompt."""
            caller = caller_of(request)
            body = await self._bodies.read(request, parse_count)
            return Reply(count_tokens(service, body, caller), self)


def _overflow(message: str) -> str:
    """Return the error text in Anthropic's words, which its clients look for."""
    match = CONTEXT_EXCEEDED.search(message)
    if match is None:
        return message
    context_len, prompt_len, max_tokens = map(int, match.groups())
    if prompt_len >= context_len:
        return f"prompt is too long: {prompt_len} tokens > {context_len - 1} maximum"
    text = f"input length and `max_tokens` exceed context limit: {prompt_len} + {max_tokens}"
    return f"{text} > {context_len}, decrease input length or `max_tokens` and try again"
