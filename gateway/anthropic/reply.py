"""One message of /v1/messages, whole or in events, and /v1/messages/count_tokens.

Invariant: the events of a stream add up to the final `blocks`.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json

from pdserve.gateway.anthropic.conversation import signature_of
from pdserve.gateway.anthropic.request_models import CountBody, MessagesBody
from pdserve.gateway.caller import Caller
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

Event = dict[str, Any]
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageContent:
    """Content of a message; consecutive parts of one kind are one block."""

    def __init__(self, *, shows_thinking: bool = True) -> None:
        """Without `shows_thinking`, a thinking block has only its signature."""
        self._shows_thinking = shows_thinking
        self.blocks: list[dict[str, Any]] = []
        self.thinking_tokens = 0
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self._first: ContentPart | None = None  # first part of the open block
        self._cut = False  # whether its call is cut off
        self._pieces: list[str] = []

    def push(self, delta: Delta) -> Iterator[Event]:
        """Yield the events of a delta."""
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
    """Return the type of a part's delta, and its text."""
    if isinstance(part, ToolCallPart):
        return "input_json_delta", part.arguments
    return ("thinking_delta" if isinstance(part, ReasoningPart) else "text_delta"), part.text


def _same_block(first: ContentPart, second: ContentPart) -> bool:
    if isinstance(first, ToolCallPart):
        return isinstance(second, ToolCallPart) and first.index == second.index
    return type(first) is type(second)


def _block(first: ContentPart, text: str, *, cut: bool = False) -> dict[str, Any]:
    """Return the block of a first part and the whole text; `cut`: its call was cut off."""
    if isinstance(first, TextPart):
        return {"type": "text", "text": text}
    if isinstance(first, ReasoningPart):
        return {"type": "thinking", "thinking": text, "signature": ""}
    arguments = arguments_object(text, cut=cut)
    return {"type": "tool_use", "id": first.id, "name": first.name, "input": arguments}


class MessageReply:
    """One message; make it after the body is checked, then take `whole` or `framed`."""

    def __init__(self, service: Service, body: MessagesBody, caller: Caller) -> None:
        """Raises ServiceError for fields that contradict each other."""
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
        """Return the message object. Raises ServiceError."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return self._message()

    async def framed(self) -> AsyncGenerator[bytes, None]:
        """Yield the framed events. Raises ServiceError."""
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
        """Return the usage; cached tokens are not input, and unknown before the end."""
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
    """Return the number of tokens of a message's prompt. Raises ServiceError."""
    sampling = RequestedSampling(structure=body.structure())
    request = ChatCompletionRequest(
        body.model, body.conversation(), sampling, tool_use=body.tool_use()
    )
    return {"input_tokens": await service.count_prompt(request, caller)}


def framed(event: Event) -> bytes:
    """Return a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event))
