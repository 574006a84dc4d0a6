"""Answers made of parts (text, reasoning, tool calls) that a test specifies."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from pdserve.gateway.caller import Caller
from pdserve.gateway.prepared_completion import PreparedCompletion, Usage
from pdserve.gateway.service import Service
from pdserve.text import ContentPart, Delta, ReasoningPart, TextPart, ToolCallPart

CACHED = 3  # tokens of each prompt


def deltas(*parts: ContentPart, finish: str = "stop", stop: str | None = None) -> list[Delta]:
    """Return a token for each part, and one that ends the answer."""
    generated = [Delta(0, (part,), (), number, None) for number, part in enumerate(parts, 1)]
    return [*generated, Delta(0, (), (), len(parts) + 1, finish, stop=stop)]


# Reasoning, a text and two calls, one of them in pieces.
CALLS = deltas(
    ReasoningPart("I "),
    ReasoningPart("look."),
    TextPart("Let me "),
    TextPart("see."),
    ToolCallPart(0, "call_a", "weather"),
    ToolCallPart(0, arguments='{"place":'),
    ToolCallPart(0, arguments=' "Rome"}'),
    ToolCallPart(1, "call_b", "weather", '{"place": "Oslo"}'),
    finish="tool_calls",
)


class ScriptedParts:
    """Replaces a service's completions: the n-th request gets the n-th answer, where an exception
    is raised. Records requests, and passes them on without what would constrain or parse an
    answer, since this one is fixed.
    """

    def __init__(self, *answers: Sequence[Delta | Exception]) -> None:
        self.requests: list[Any] = []
        self._answers = list(answers)

    def install(self, service: Service) -> None:
        prepare = service.prepare

        def recorded(
            request: Any, caller: Caller
        ) -> AbstractAsyncContextManager[PreparedCompletion]:
            self.requests.append(request)
            sampling = replace(request.sampling, structure=None, thinking_budget=None)
            return prepare(replace(request, tool_use=None, sampling=sampling), caller)

        service.prepare = recorded  # type: ignore[method-assign]
        service.completions = self  # type: ignore[assignment]

    async def stream(self, completion: PreparedCompletion) -> AsyncGenerator[Delta | Usage, None]:
        answer = self._answers.pop(0)
        counted = thought = 0
        for delta in answer:
            if isinstance(delta, Exception):
                raise delta
            counted = delta.num_tokens
            if any(isinstance(part, ReasoningPart) for part in delta.content):
                thought = counted
            yield delta
        yield Usage(len(completion.prompts[0].ids), counted, CACHED, reasoning_tokens=thought)

    def messages(self, number: int = -1) -> list[dict[str, Any]]:
        """Return the messages for a template."""
        return [dict(message) for message in self.requests[number].conversation.messages]


class MemoryStore:
    """A ResponseStore in memory."""

    def __init__(self, fails: Exception | None = None, room: bool = True) -> None:
        self.kept: dict[tuple[bytes, str], Any] = {}
        self._fails = fails
        self._room = room

    async def save(self, tenant: bytes, kept: Any) -> bool:
        if self._fails:
            raise self._fails
        if self._room:
            self.kept[tenant, kept.id] = kept
        return self._room

    async def find(self, tenant: bytes, name: str) -> Any:
        return self.kept.get((tenant, name))

    async def remove(self, tenant: bytes, name: str) -> bool:
        return self.kept.pop((tenant, name), None) is not None
