"""The content of an answer in Ollama's fields, from the deltas of its choice.

Pure. Invariant: a call is returned once, when it is complete.
"""

from collections.abc import Sequence
from typing import Any

from pdserve.gateway.choice import Delta
from pdserve.gateway.text.parts import (
    ContentPart,
    ToolCallPart,
    arguments_object,
    calls_of,
    reasoning_of,
    text_of,
)


class OllamaContent:
    """Converter of each delta to a message."""

    def __init__(self) -> None:
        self._call: list[ContentPart] = []  # parts of the incomplete call

    def push(self, delta: Delta) -> dict[str, Any]:
        """Return the new `content`, `thinking` and `tool_calls`, without those that are empty."""
        calls = self._complete(delta)
        fields = {
            "content": text_of(delta.content),
            "thinking": reasoning_of(delta.content),
            "tool_calls": calls,
        }
        return {name: value for name, value in fields.items() if value}

    def _complete(self, delta: Delta) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for part in delta.content:
            if isinstance(part, ToolCallPart):
                if part.id:  # the first part of another call
                    calls += self._take()
                self._call.append(part)
        if delta.finish is not None:
            calls += self._take()
        return calls

    def _take(self) -> list[dict[str, Any]]:
        calls = [_call(call) for call in calls_of(self._call)]
        self._call = []
        return calls


def joined(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the messages of a stream add up to."""
    message = {
        "content": "".join(part.get("content", "") for part in messages),
        "thinking": "".join(part.get("thinking", "") for part in messages),
        "tool_calls": [call for part in messages for call in part.get("tool_calls", ())],
    }
    return {name: value for name, value in message.items() if value}


def _call(call: ToolCallPart) -> dict[str, Any]:
    function = {"index": call.index, "name": call.name}
    return {
        "id": call.id,
        "function": {**function, "arguments": arguments_object(call.arguments, cut=call.cut)},
    }
