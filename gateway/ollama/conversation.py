"""Messages of Ollama's API made into those that chat templates expect; pure."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from pdserve.gateway.http.validation import StrictModel
from pdserve.gateway.openai.bodies.schema import MAX_TOOL_CALLS


class OllamaFunction(StrictModel):
    """What is called; `arguments` is an object."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(StrictModel):
    id: str | None = None
    function: OllamaFunction


class OllamaMessage(StrictModel):
    """One message; gateway/text checks its role when it fills the template."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = Field(None, max_length=MAX_TOOL_CALLS)
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[None] | None = Field(None, max_length=0)  # not served


def conversation(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """The turns of a chat.

    Calls have no ids in most of Ollama's clients, and templates want some: each call gets one, and
    a result belongs to the call with its id, else to the first open one with its tool's name, else
    to the first open one.
    """
    turns: list[dict[str, Any]] = []
    open_calls: dict[str, str] = {}  # names of tools by the ids of calls without a result
    num_calls = 0
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                name = (
                    call.id or f"call{num_calls:05d}"
                )  # nine letters, as Mistral's templates want
                num_calls += 1
                open_calls[name] = call.function.name
                calls.append(
                    {"id": name, "type": "function", "function": call.function.model_dump()}
                )
            turn |= {"content": message.content or None, "tool_calls": calls}
        if message.role == "tool":
            turn |= _answered(message, open_calls)
        turns.append(turn)
    return turns


def _answered(message: OllamaMessage, open_calls: dict[str, str]) -> dict[str, str]:
    """Which call a result belongs to; it is open no more."""
    by_tool = (id_ for id_, tool in open_calls.items() if tool == message.tool_name)
    found = message.tool_call_id or next(by_tool, next(iter(open_calls), ""))
    tool = open_calls.pop(found, "")
    of_call = {"tool_call_id": found, "name": message.tool_name or tool}
    return {key: value for key, value in of_call.items() if value}
