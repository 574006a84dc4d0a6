"""Normalizes the chat messages of a request to a form that every template understands; pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic_core import from_json

from pdserve.text.errors import TextError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
REASONING = (  # message fields that hold reasoning
    "reasoning_content", "reasoning", "thinking", "thoughts", "thought", "tool_plan",
)  # fmt: skip
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # of reasoning
VERBOSITIES = ("low", "medium", "high")  # of the answer
THINKING_SWITCHES = ("enable_thinking", "thinking")  # names that templates give the switch


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The input of a chat template."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True  # opens the assistant's turn
    continue_final_message: bool = False  # leaves the last message open; the answer continues it
    variables: Mapping[str, Any] = field(default_factory=dict)  # specific to the template
    suggested: Mapping[str, Any] = field(default_factory=dict)  # variables used where allowed
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_parser: str = ""  # for calls as plain text, if the template does not support calls
    messages_field: str = "messages"  # the client's name of the field

    def __post_init__(self) -> None:
        """Raises TextError if the last message cannot be continued."""
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
                "continue_final_message requires a last assistant message without tool calls",
                "continue_final_message",
            )


def thinking_switches(enabled: bool) -> dict[str, bool]:
    """Return the template variables that turn thinking on or off."""
    return dict.fromkeys(THINKING_SWITCHES, enabled)


def suggested_variables(effort: str | None, verbosity: str | None) -> dict[str, Any]:
    """Return the template variables for a reasoning effort and a verbosity."""
    suggested: dict[str, Any] = {}
    if effort is not None:
        suggested["reasoning_effort"] = effort
        if effort == "none":
            suggested |= thinking_switches(False)
    if verbosity is not None:
        suggested["verbosity"] = verbosity
    return suggested


class CallArguments(NamedTuple):
    """The arguments of a tool call as the model wrote them."""

    text: str
    value: Mapping[str, Any] | None  # None: the text is not a JSON object


def normalized(
    messages: Sequence[Mapping[str, Any]], field: str = "messages"
) -> list[dict[str, Any]]:
    """Normalize messages to the form that text/templates adapts to a chat template.

    In the result, roles are known, contents are strings or lists of text parts, arguments of calls
    are CallArguments and reasoning is in `reasoning_content`. Other fields are kept; null fields
    are dropped. Only assistant and tool messages may lack content; without tool calls, the missing
    content becomes "". `field` is the client's name of the messages. Raises TextError that names
    `field` or a part of it if a message is invalid.
    """
    if not messages:
        raise TextError(f"{field} must not be empty", field)
    return [_message(message, f"{field}[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], param: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        roles = ", ".join(ROLES)
        raise TextError(f"unknown role {role!r:.60}; it must be one of {roles}", f"{param}.role")
    if role == "function":  # OpenAI's older name
        role = "tool"
    result = {key: value for key, value in message.items() if value is not None}
    result["role"] = role
    thoughts = [result.pop(name) for name in REASONING if name in result]
    if thoughts:
        result["reasoning_content"] = next(filter(None, thoughts), "")
    calls = result.pop("tool_calls", None)  # a template may test only for the key
    if calls:
        result["tool_calls"] = _tool_calls(calls, f"{param}.tool_calls")
    if "content" in result or role not in ("assistant", "tool"):
        content_text(result.get("content"), f"{param}.content")
    elif not calls:
        result["content"] = ""
    return result


def _tool_calls(calls: object, param: str) -> list[dict[str, Any]]:
    """Return the calls with their arguments as CallArguments."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise TextError("tool_calls must be a list", param)
    result = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise TextError("a tool call must have a function with a name", f"{param}[{index}]")
        arguments = _arguments(function.get("arguments"))
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _arguments(arguments: object) -> CallArguments:
    """Parse arguments, tolerating invalid JSON: the turn is still part of the conversation."""
    if isinstance(arguments, str) and arguments.strip():
        try:  # from_json bounds the depth and rejects NaN
            value = from_json(arguments, allow_inf_nan=False)
        except ValueError:
            value = None
        return CallArguments(arguments, value if isinstance(value, Mapping) else None)
    value = {} if arguments is None or isinstance(arguments, str) else arguments
    text = json.dumps(value, ensure_ascii=False)
    return CallArguments(text, value if isinstance(value, Mapping) else None)


def content_text(content: object, param: str) -> str:
    """Return the content of a message as one string. Raises TextError that names the field if the
    content is not text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise TextError("content must be a string or a list of text parts", param)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise TextError(
                f"content parts of type {kind!r:.60} are not supported; use 'text'",
                f"{param}[{index}].type",
            )
        if not isinstance(part.get("text"), str):
            raise TextError("text must be a string", f"{param}[{index}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def final_text(conversation: TemplateInput) -> str:
    """Return the text of the last message, which the answer continues. Raises TextError if its
    content is not text."""
    content = conversation.messages[-1].get("content")
    return "" if content is None else content_text(content, conversation.messages_field)
