"""Anthropic's API as an HttpApi: generates a message, whole or as server-sent events, and counts
tokens. Also its routes, its errors, and the models that describe its responses.

Invariant: the events of a stream add up to the final `MessageContent.blocks`.
"""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from pydantic_core import to_json

from pdserve.engine.api import CONTEXT_EXCEEDED
from pdserve.gateway.anthropic.conversation import signature_of
from pdserve.gateway.anthropic.request_models import (
    CountBody,
    MessagesBody,
    parse,
)
from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import HttpApi, HttpError, HttpLimits
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.docs import ResponseModel, describe
from pdserve.gateway.http.guard import caller_of
from pdserve.gateway.http.responses import EventStream, Reply
from pdserve.gateway.prepared_completion import Usage
from pdserve.gateway.service import Service
from pdserve.text import (
    ChatCompletionRequest,
    ContentPart,
    Delta,
    ReasoningPart,
    RequestedSampling,
    TextPart,
    ToolCallPart,
    arguments_object,
)


class MessagesErrorDetail(ResponseModel):
    type: str
    message: str


class MessagesError(ResponseModel):
    """The JSON body of every error response, and the data of the last event of a stream that ends
    with an error."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None


class TextBlock(ResponseModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(ResponseModel):
    """A content block with the model's reasoning. Clients send it back, together with its
    signature, in later requests."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(ResponseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(ResponseModel):
    thinking_tokens: int


class Inexactness(ResponseModel):
    """`inexact` is true if KV cache blocks computed with other weights or numerics were used, so
    that the same request may give other tokens."""

    inexact: bool


class MessageUsage(ResponseModel):
    """Token counts of a message. `input_tokens` does not include `cache_read_input_tokens`, the
    tokens that were read from the KV cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    pdserve: Inexactness
    service_tier: Literal["standard"] | None = None


class MessageObject(ResponseModel):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class BlockDelta(ResponseModel):
    """The data of an event: a piece of a content block; in `message_delta`, the reason why the
    message ended."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | None = (
        None
    )
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None


class MessageEvent(ResponseModel):
    """One event of a streamed message; its fields depend on its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: MessageObject | None = None
    index: int | None = None
    content_block: AnswerBlock | None = None
    delta: BlockDelta | None = None
    usage: MessageUsage | None = None


class TokenCount(ResponseModel):
    input_tokens: int


Event = dict[str, Any]
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageContent:
    """Builds the content blocks of a message. Consecutive pieces of reasoning, of text, or of one
    tool call become one block."""

    def __init__(self, *, shows_thinking: bool = True) -> None:
        """Start without blocks. If `shows_thinking` is false, thinking blocks have a signature and
        no text."""
        self._shows_thinking = shows_thinking
        self.blocks: list[dict[str, Any]] = []
        self.thinking_tokens = 0
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self._first: ContentPart | None = None  # first part of the open block
        self._cut = False  # whether its call is cut off
        self._pieces: list[str] = []

    def push(self, delta: Delta) -> Iterator[Event]:
        """Add a piece of the model's output, and yield the stream's events for it."""
        for part in delta.content:
            if isinstance(part, ReasoningPart):
                self.thinking_tokens = delta.num_tokens
            if self._first is None or not _same_block(self._first, part):
                yield from self._close()
                self._first = part
                yield {
                    "type": "content_block_start",
                    "index": len(self.blocks),
                    "content_block": _block(part, ""),
                }
            self._cut = isinstance(part, ToolCallPart) and part.cut
            name, piece = _piece(part)
            if piece:
                self._pieces.append(piece)
            if piece and (self._shows_thinking or name != "thinking_delta"):
                yield {
                    "type": "content_block_delta",
                    "index": len(self.blocks),
                    "delta": {"type": name, _KEYS[name]: piece},
                }
        if delta.finish is not None:
            yield from self._close()
            self.stop_sequence = delta.stop
            reason = _STOP_REASONS[delta.finish]
            self.stop_reason = reason if delta.stop is None else "stop_sequence"

    def _close(self) -> Iterator[Event]:
        if self._first is None:
            return
        index = len(self.blocks)
        block = _block(self._first, "".join(self._pieces), cut=self._cut)
        if block["type"] == "thinking":
            hidden = not self._shows_thinking
            block["signature"] = signature_of(block["thinking"], hidden=hidden)
            if hidden:
                block["thinking"] = ""
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
        self.blocks.append(block)
        self._first, self._pieces = None, []


_KEYS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def _piece(part: ContentPart) -> tuple[str, str]:
    """Return the delta type of a content part in Anthropic's API, such as `text_delta`, and its
    text."""
    if isinstance(part, ToolCallPart):
        return "input_json_delta", part.arguments
    return ("thinking_delta" if isinstance(part, ReasoningPart) else "text_delta"), part.text


def _same_block(first: ContentPart, second: ContentPart) -> bool:
    if isinstance(first, ToolCallPart):
        return isinstance(second, ToolCallPart) and first.index == second.index
    return type(first) is type(second)


def _block(first: ContentPart, text: str, *, cut: bool = False) -> dict[str, Any]:
    """Return the content block with the whole `text`; `first` is its first part, which has its type
    and, for a call, its id and name. `cut`: the call's arguments are incomplete, because the output
    ended."""
    if isinstance(first, TextPart):
        return {"type": "text", "text": text}
    if isinstance(first, ReasoningPart):
        return {"type": "thinking", "thinking": text, "signature": ""}
    arguments = arguments_object(text, cut=cut)
    return {"type": "tool_use", "id": first.id, "name": first.name, "input": arguments}


class MessageReply:
    """Generates the message for a validated request body. Call either `whole` or `framed`, once."""

    def __init__(self, service: Service, body: MessagesBody, caller: Caller) -> None:
        """Build the chat request. Raises ServiceError for fields of the body that contradict each
        other."""
        self._service = service
        self._request = ChatCompletionRequest(
            body.model, body.conversation(), body.sampling(), tool_use=body.tool_use()
        )
        self._id = f"msg_{caller.request_id}"
        self._caller = caller.of_body(self._id, None, body.user)
        self._content = MessageContent(shows_thinking=body.shows_thinking)
        self._model = body.model
        self._usage = Usage(0, 0, 0)

    async def whole(self) -> dict[str, Any]:
        """Generate the whole message and return it as an object. Raises ServiceError."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return self._message()

    async def framed(self) -> AsyncGenerator[bytes, None]:
        """Generate the message and yield its server-sent events, ready to be sent. Raises
        ServiceError."""
        async with aclosing(self._events()) as events:
            async for event in events:
                yield framed(event)

    async def _events(self) -> AsyncGenerator[Event, None]:
        async with self._service.prepare(self._request, self._caller) as completion:
            self._model = completion.model.card.name
            self._usage = Usage(sum(len(prompt.ids) for prompt in completion.prompts), 0, 0)
            has_begun = False
            async with aclosing(self._service.completions.stream(completion)) as items:
                async for item in items:
                    if not has_begun:
                        has_begun = True
                        yield {"type": "message_start", "message": self._message()}
                    if isinstance(item, Usage):
                        self._usage = item
                        continue
                    for event in self._content.push(item):
                        yield event
            delta = {
                "stop_reason": self._content.stop_reason,
                "stop_sequence": self._content.stop_sequence,
            }
            yield {"type": "message_delta", "delta": delta, "usage": self._usage_object()}
            yield {"type": "message_stop"}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._content.blocks,
            "stop_reason": self._content.stop_reason,
            "stop_sequence": self._content.stop_sequence,
            "usage": {**self._usage_object(), "service_tier": "standard"},
        }

    def _usage_object(self) -> dict[str, Any]:
        """Return the message's `usage`. `input_tokens` excludes cached tokens, whose number is
        known only at the end of the message; before, it is 0."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._content.thinking_tokens},
            "pdserve": {"inexact": usage.inexact},
        }


async def count_tokens(service: Service, body: CountBody, caller: Caller) -> dict[str, Any]:
    """Return the answer of /v1/messages/count_tokens: the number of tokens in the prompt. Raises
    ServiceError."""
    sampling = RequestedSampling(structure=body.structure())
    request = ChatCompletionRequest(
        body.model, body.conversation(), sampling, tool_use=body.tool_use()
    )
    return {"input_tokens": await service.count_prompt(request, caller)}


def framed(event: Event) -> bytes:
    """Return an event as the bytes of a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event))


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


class AnthropicApi(HttpApi):
    """Anthropic's API: /v1/messages and /v1/messages/count_tokens, for any value of the header
    `anthropic-version`."""

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
            "/v1/messages", **describe(MessagesBody, response=MessageObject, event=MessageEvent)
        )
        async def messages(request: Request) -> Response:
            """Generate the next message of a conversation."""
            caller = caller_of(request)
            body = await self._bodies.read(request, partial(parse, MessagesBody))
            reply = MessageReply(service, body, caller)
            if body.stream:
                return EventStream(reply.framed(), self, self._limits, ping=lambda: PING)
            return Reply(reply.whole(), self)

        @app.post("/v1/messages/count_tokens", **describe(CountBody, response=TokenCount))
        async def count(request: Request) -> Response:
            """Count the tokens of a message's prompt."""
            caller = caller_of(request)
            body = await self._bodies.read(request, partial(parse, CountBody))
            return Reply(count_tokens(service, body, caller), self)


def _overflow(message: str) -> str:
    """Convert the error message about a prompt that is too long for the context to Anthropic's
    wording, by which its clients recognize this error."""
    match = CONTEXT_EXCEEDED.search(message)
    if match is None:
        return message
    context_len, prompt_len, max_tokens = map(int, match.groups())
    if prompt_len >= context_len:
        return f"prompt is too long: {prompt_len} tokens > {context_len - 1} maximum"
    text = f"input length and `max_tokens` exceed context limit: {prompt_len} + {max_tokens}"
    return f"{text} > {context_len}, decrease input length or `max_tokens` and try again"
