"""Custom tools: the model sees a function of one string, and the client gets only that string.

Pure. Invariant: the pieces of an input add up to the same text however its JSON is cut.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from pydantic_core import from_json, to_json

from pdserve.gateway.http.validation import StrictModel
from pdserve.gateway.requests.tool_use import Tool

INPUT = "input"
_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
MAX_OPENING = 256  # characters before the text
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])")
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class CustomFormat(StrictModel):
    """What the input has to match. A regular expression is kept to; a Lark grammar is shown to
    the model."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str = Field("", max_length=1 << 15)


def custom_tool(
    name: str,
    description: str,
    form: CustomFormat | None,
    param: str = "",
    definition: str = "definition",
) -> Tool:
    """Return the function that the model is offered. `param`: the request's field with `form`,
    which has its grammar in the field `definition`."""
    value: dict[str, Any] = {"type": "string"}
    strict, place = False, ""
    if form is not None and form.type == "grammar":
        if form.syntax == "regex":
            value["pattern"] = f"^(?:{form.definition})$"
            strict, place = True, f"{param}.{definition}"
        else:
            description = f"{description}\n\nThe input matches this Lark grammar:\n"
            description = (description + form.definition).strip()
    parameters = {
        "type": "object",
        "properties": {INPUT: value},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return Tool(name, description, parameters, strict, param, place)


def custom_arguments(text: str) -> str:
    """Return the arguments of the function, for an input."""
    return to_json({INPUT: text}).decode()


class CustomInput:
    """Converter of the pieces of the function's arguments to the input."""

    def __init__(self) -> None:
        self._raw = ""  # not read yet
        self._begun = self._ended = False
        self._other: list[str] | None = None  # arguments of another form

    def push(self, piece: str) -> str:
        """Return the new part of the input."""
        if self._ended:
            return ""
        if self._other is not None:
            self._other.append(piece)
            return ""
        self._raw += piece
        if not self._begun:
            opening = _OPENING.match(self._raw)
            if opening is None:
                if len(self._raw) > MAX_OPENING:
                    self._other, self._raw = [self._raw], ""
                return ""
            self._begun, self._raw = True, self._raw[opening.end() :]
        return self._read()

    def finish(self) -> str:
        """Return the input of arguments in another form: their only text, or all of them."""
        if self._begun:
            return ""
        raw = "".join(self._other or [self._raw])
        try:
            value = from_json(raw, allow_partial=True)
        except ValueError:
            return raw
        if isinstance(value, Mapping):
            texts = [value[INPUT]] if INPUT in value else list(value.values())
            if len(texts) == 1 and isinstance(texts[0], str):
                return texts[0]
        return "" if value == {} else raw

    def _read(self) -> str:
        """Return the text up to its end, or to an incomplete escape."""
        raw, at, found = self._raw, 0, []
        while at < len(raw):
            if raw[at] == '"':
                self._ended = True
                break
            if plain := _PLAIN.match(raw, at):
                found.append(plain[0])
                at = plain.end()
                continue
            escape = _ESCAPE.match(raw, at)
            if escape is None:
                if len(raw) - at < 6:
                    break
                found.append(raw[at])  # not JSON: keep what the model has written
                at += 1
                continue
            text, end = _unescaped(escape[0]), escape.end()
            if "\ud800" <= text <= "\udbff":  # the first surrogate of a pair
                rest = raw[end : end + 6]
                if len(rest) < 6 and rest[:2] == "\\u"[: len(rest)]:
                    break
                second = _ESCAPE.fullmatch(rest)
                low = _unescaped(rest) if second else ""
                if "\udc00" <= low <= "\udfff":
                    text, end = _joined(text, low), end + 6
            found.append("\ufffd" if "\ud800" <= text <= "\udfff" else text)
            at = end
        self._raw = raw[at:]
        return "".join(found)


def _unescaped(escape: str) -> str:
    kind = escape[1]
    return chr(int(escape[2:], 16)) if kind == "u" else _ESCAPED.get(kind, kind)


def _joined(high: str, low: str) -> str:
    return chr(0x10000 + ((ord(high) - 0xD800) << 10) + (ord(low) - 0xDC00))
