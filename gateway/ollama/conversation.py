"""Converts messages of Ollama's API to those that chat templates expect; pure."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from pdserve.gateway.http import StrictModel
from pdserve.gateway.openai.request_models import MAX_TOOL_CALLS


def _no_images(value: Any) -> None:
    if value not in (None, []):
        raise ValueError("images are not supported by this server")


class OllamaFunction(StrictModel):
    """The function of a call; `arguments` is an object, or the text that the model wrote."""

    name: str
    arguments: Any = None


class OllamaCall(StrictModel):
    id: str | None = None
    function: OllamaFunction


class OllamaMessage(StrictModel):
    """One message; text/templates checks its role when it fills the template."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = Field(None, max_length=MAX_TOOL_CALLS)
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[None, BeforeValidator(_no_images)] = None


def conversation(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the turns of a chat.

    Most of Ollama's clients send calls without ids, and templates require ids: each call gets one.
    A result belongs to the call with its id, else to the first open call with its tool's name, else
    to the first open call.
    """
    turns: list[dict[str, Any]] = []
    open_calls = _OpenCalls()
    num_calls = 0
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                # Nine letters, as Mistral's templates require.
                id_ = call.id or f"call{num_calls:05d}"
                num_calls += 1
                open_calls.add(id_, call.function.name)
                function = {"name": call.function.name, "arguments": call.function.arguments}
                calls.append({"id": id_, "type": "function", "function": function})
            turn |= {"content": message.content or None, "tool_calls": calls}
        if message.role == "tool":
            id_, tool = open_calls.take(message.tool_call_id, message.tool_name)
            fields = {"tool_call_id": id_, "name": tool}
            turn |= {key: value for key, value in fields.items() if value}
        turns.append(turn)
    return turns


class _OpenCalls:
    """Calls without a result, in order. A conversation may have many, so each is visited once."""

    def __init__(self) -> None:
        self._tools: dict[str, str] = {}  # by the ids of open calls
        self._ids: defaultdict[str, deque[str]] = defaultdict(deque)  # by tool, closed ones too

    def add(self, id_: str, tool: str) -> None:
        self._tools[id_] = tool
        self._ids[tool].append(id_)

    def take(self, id_: str | None, tool: str | None) -> tuple[str, str]:
        """Return the id and the tool of the call that a result belongs to, as far as known, and
        close it."""
        ids = self._ids.get(tool or "", deque())
        while not id_ and ids:
            first = ids.popleft()
            id_ = first if first in self._tools else None
        id_ = id_ or next(iter(self._tools), "")
        called_tool = self._tools.pop(id_, "")
        return id_, tool or called_tool
