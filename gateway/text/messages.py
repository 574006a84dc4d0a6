"""Chat messages as clients send them, made into what every template understands; pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.gateway.text.errors import TextError

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What a chat template is filled with."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True  # opens the assistant's turn
    continue_final_message: bool = False  # leaves the last message open, for the answer to go on
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template's own
    tools: Sequence[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        """Raises TextError for a message that cannot be continued."""
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise TextError(
                "continue_final_message and add_generation_prompt cannot both be true",
                "continue_final_message",
            )
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant":
            raise TextError(
                "continue_final_message needs a last message of the assistant",
                "continue_final_message",
            )


def normalized(
    messages: Sequence[Mapping[str, Any]], *, knows_developer: bool
) -> list[dict[str, Any]]:
    """Messages with a known role and a content that is one string; other fields are kept.

    Text parts are joined by line breaks. `developer` becomes `system` for a template that does not
    know it. Raises TextError that names the field.
    """
    if not messages:
        raise TextError("messages must not be empty", "messages")
    return [
        _message(message, f"messages[{index}]", knows_developer)
        for index, message in enumerate(messages)
    ]


def _message(message: Mapping[str, Any], param: str, knows_developer: bool) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise TextError(f"unknown role {role!r:.60}; it must be one of {known}", f"{param}.role")
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    if role == "developer" and not knows_developer:
        role = "system"
    made = {**message, "role": role, "content": _text(content, f"{param}.content")}
    if message.get("tool_calls"):
        made["tool_calls"] = _tool_calls(message["tool_calls"], f"{param}.tool_calls")
    return made


def _tool_calls(calls: object, param: str) -> list[dict[str, Any]]:
    """Calls of functions, with their arguments as the object that templates write out."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise TextError("tool_calls must be a list", param)
    made = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise TextError("a tool call needs a function with a name", f"{param}[{index}]")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, Mapping):
            where = f"{param}[{index}].function.arguments"
            raise TextError("arguments must be a JSON object, written as a string", where)
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def _text(content: object, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise TextError("content must be a string or a list of text parts", param)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise TextError(
                f"content parts of type {kind!r:.60} are not supported, only 'text'",
                f"{param}[{index}].type",
            )
        if not isinstance(part.get("text"), str):
            raise TextError("text must be a string", f"{param}[{index}].text")
        texts.append(part["text"])
    return "\n".join(texts)
