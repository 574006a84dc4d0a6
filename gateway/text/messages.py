"""Chat messages as clients send them, made into what every template understands; pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.gateway.text.errors import TextError

ROLES = ("system", "developer", "user", "assistant", "tool")


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
    return {**message, "role": role, "content": _text(content, f"{param}.content")}


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
