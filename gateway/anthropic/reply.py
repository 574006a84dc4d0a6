"""One message of /v1/messages, whole or in events, and /v1/messages/count_tokens."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json

from pdserve.gateway.anthropic.output import Event, MessageContent
from pdserve.gateway.anthropic.schema import CountBody, MessagesBody
from pdserve.gateway.prepared_completion import Usage
from pdserve.gateway.requests.caller import Caller
from pdserve.gateway.requests.completions import ChatCompletionRequest
from pdserve.gateway.requests.sampling import RequestedSampling
from pdserve.gateway.service import Service


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
