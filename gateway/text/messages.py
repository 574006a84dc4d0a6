"""Chat messages as clients send them, made into what every template understands; pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from pdserve.gateway.text.errors import TextError

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # of reasoning
VERBOSITIES = ("low", "medium", "high")  # of the answer


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What a chat template is filled with."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True  # opens the assistant's turn
    continue_final_message: bool = False  # leaves the last message open, for the answer to go on
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template's own
    suggested: Mapping[str, Any] = field(default_factory=dict)  # likewise, where they are allowed
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_parser: str = ""  # of calls as plain text, where the template has no place for tools
    messages_field: str = "messages"  # as the client calls it

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
        if last.get("role") != "assistant" or last.get("tool_calls"):
            raise TextError(
                "continue_final_message needs a last message of the assistant without tool calls",
                "continue_final_message",
            )


def suggested_variables(effort: str | None, verbosity: str | None) -> dict[str, Any]:
    """Variables of a template: how much to think, and how much to say."""
    suggested: dict[str, Any] = {}
    if effort is not None:
        suggested["reasoning_effort"] = effort
        if effort == "none":
            suggested |= {"enable_thinking": False, "thinking": False}
    if verbosity is not None:
        suggested["verbosity"] = verbosity
    return suggested


def normalized(
    messages: Sequence[Mapping[str, Any]],
    *,
    knows_developer: bool,
    knows_null: bool = False,
    field: str = "messages",
) -> list[dict[str, Any]]:
    """Messages with a known role and a content that is one string; other fields are kept.

    Text parts are joined by line breaks. `developer` becomes `system` for a template that does not
    know it, and the content of a turn that only calls tools is empty for one that does not ask
    whether there is any. Raises TextError that names `field`, the client's name of the messages, or
    a part of it.
    """
    if not messages:
        raise TextError(f"{field} must not be empty", field)
    return [
        _message(message, f"{field}[{index}]", knows_developer, knows_null)
        for index, message in enumerate(messages)
    ]


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same messages with the arguments of their tool calls as JSON text."""

    def written(call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [written(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _message(
    message: Mapping[str, Any], param: str, knows_developer: bool, knows_null: bool
) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise TextError(f"unknown role {role!r:.60}; it must be one of {known}", f"{param}.role")
    content = message.get("content")
    # An answer may be calls alone, or a thought that was cut off.
    rest = message.get("tool_calls") or message.get("reasoning_content")
    no_text = content is None and role == "assistant" and bool(rest)
    if role == "developer" and not knows_developer:
        role = "system"
    text = (None if knows_null else "") if no_text else content_text(content, f"{param}.content")
    made = {**message, "role": role, "content": text}
    calls = made.pop("tool_calls", None)  # a template may only ask whether there is the key
    if calls:
        made["tool_calls"] = _tool_calls(calls, f"{param}.tool_calls")
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
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:  # bounds the depth, and takes no NaN
                arguments = from_json(arguments, allow_inf_nan=False)
            except ValueError:
                arguments = None
        if not isinstance(arguments, Mapping):
            where = f"{param}[{index}].function.arguments"
            raise TextError("arguments must be a JSON object, written as a string", where)
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def content_text(content: object, param: str) -> str:
    """A message's content as one string. Raises TextError that names the field."""
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


def final_text(conversation: TemplateInput) -> str:
    """The text of the last message, with which an answer goes on. Raises TextError."""
    content = conversation.messages[-1].get("content")
    return "" if content is None else content_text(content, conversation.messages_field)
