"""Chat messages as clients send them, made into what every template understands; pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic_core import from_json

from pdserve.gateway.text.errors import TextError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
REASONING = (  # names of a thought
    "reasoning_content", "reasoning", "thinking", "thoughts", "thought", "tool_plan",
)  # fmt: skip
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # of reasoning
VERBOSITIES = ("low", "medium", "high")  # of the answer


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What a chat template is filled with."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True  # opens the assistant's turn
    continue_final_message: bool = False  # leaves the last message open, for the answer to go on
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template's own
    suggested: Mapping[str, Any] = field(default_factory=dict)  # more of them, if allowed
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_parser: str = ""  # of calls as plain text, where the template has no place for them
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


class CallArguments(NamedTuple):
    """The arguments of a call that a model has written."""

    text: str
    value: Mapping[str, Any] | None  # None: the text is no JSON object


def normalized(
    messages: Sequence[Mapping[str, Any]], field: str = "messages"
) -> list[dict[str, Any]]:
    """Messages in the form that templates/turns.py makes into what one template can render.

    Roles are known ones, contents are texts or lists of text parts, arguments of calls are
    CallArguments, a thought is `reasoning_content`; other fields are kept, those that are null are
    left out. Only the assistant and a tool may have no content, and only the assistant's then stays
    without one, where it has calls. Raises TextError that names `field`, the client's name of the
    messages, or a part of it.
    """
    if not messages:
        raise TextError(f"{field} must not be empty", field)
    return [_message(message, f"{field}[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], param: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise TextError(f"unknown role {role!r:.60}; it must be one of {known}", f"{param}.role")
    if role == "function":  # OpenAI's older name
        role = "tool"
    made = {key: value for key, value in message.items() if value is not None}
    made["role"] = role
    thoughts = [made.pop(name) for name in REASONING if name in made]
    if thoughts:
        made["reasoning_content"] = next(filter(None, thoughts), "")
    calls = made.pop("tool_calls", None)  # a template may only ask whether there is the key
    if calls:
        made["tool_calls"] = _tool_calls(calls, f"{param}.tool_calls")
    if "content" in made or role not in ("assistant", "tool"):
        content_text(made.get("content"), f"{param}.content")
    elif not calls:
        made["content"] = ""
    return made


def _tool_calls(calls: object, param: str) -> list[dict[str, Any]]:
    """Calls of functions."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise TextError("tool_calls must be a list", param)
    made = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise TextError("a tool call needs a function with a name", f"{param}[{index}]")
        arguments = _arguments(function.get("arguments"))
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def _arguments(written: object) -> CallArguments:
    """What a model has written need be no JSON; its turn stays part of the conversation."""
    if isinstance(written, str) and written.strip():
        try:  # bounds the depth, and takes no NaN
            value = from_json(written, allow_inf_nan=False)
        except ValueError:
            value = None
        return CallArguments(written, value if isinstance(value, Mapping) else None)
    value = {} if written is None or isinstance(written, str) else written
    text = json.dumps(value, ensure_ascii=False)
    return CallArguments(text, value if isinstance(value, Mapping) else None)


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
