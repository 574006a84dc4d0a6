"""Custom tools: the model sees a function of one string, and the client gets only that string.

Pure. Invariant: the pieces of an input add up to the same text however its JSON is cut.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError, from_json, to_json

from pdserve.gateway.http import StrictModel
from pdserve.text import Tool

INPUT = "input"
_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
MAX_OPENING = 256  # characters before the text
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])")
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def _of_grammar(value: str | None, info: ValidationInfo) -> str | None:
    if not value and info.data.get("type") == "grammar":
        raise PydanticCustomError("missing", "is required")
    return value


class CustomFormat(StrictModel):
    """What the input has to match. A regular expression is kept to; a Lark grammar is shown to
    the model."""

    type: Literal["text", "grammar"] = "text"
    syntax: Annotated[Literal["lark", "regex"] | None, AfterValidator(_of_grammar)] = Field(
        None, validate_default=True
    )
    definition: Annotated[str, AfterValidator(_of_grammar)] = Field(
        "", max_length=1 << 15, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        """Accept a grammar that is nested in an object, as in chat requests, or has no type."""
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("grammar"), dict):
            value = {**value, **value["grammar"]}
        if value.get("type") is None and value.keys() & {"syntax", "definition"}:
            value = {**value, "type": "grammar"}
        return value


def custom_tool(name: str, description: str, format_: CustomFormat | None, param: str = "") -> Tool:
    """Return the function that the model is offered. `param`: the field of `format_`."""
    value: dict[str, Any] = {"type": "string"}
    strict, schema_path = False, ""
    if format_ is not None and format_.type == "grammar":
        if format_.syntax == "regex":
            value["pattern"] = f"^(?:{format_.definition})$"
            strict, schema_path = True, f"{param}.definition"
        else:
            description = f"{description}\n\nThe input matches this Lark grammar:\n"
            description = (description + format_.definition).strip()
    parameters = {
        "type": "object",
        "properties": {INPUT: value},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return Tool(name, description, parameters, strict, param, schema_path)


def custom_arguments(text: str) -> str:
    """Return the arguments of the function, for an input."""
    return to_json({INPUT: text}).decode()


def written(value: Any) -> str:
    """Return the input or the arguments of an earlier call as a text."""
    if isinstance(value, str):
        return value
    return "" if value is None else to_json(value).decode()


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
        """Return the input of arguments in another form: their only text, or all of them as they
        are written."""
        if self._begun:
            return ""
        raw = "".join(self._other or [self._raw])
        value = _parsed(raw, "trailing-strings")
        if value == {}:
            return ""
        text = value.get(INPUT) if isinstance(value, Mapping) else None
        if text is None:
            complete = _parsed(raw, False)  # another field counts only if no more can follow
            if isinstance(complete, Mapping) and len(complete) == 1:
                (text,) = complete.values()
        return text if isinstance(text, str) else raw

    def _read(self) -> str:
        """Return the text up to its end, or to an incomplete escape."""
        raw, position, texts = self._raw, 0, []
        while position < len(raw):
            if raw[position] == '"':
                self._ended = True
                break
            if plain := _PLAIN.match(raw, position):
                texts.append(plain[0])
                position = plain.end()
                continue
            escape = _ESCAPE.match(raw, position)
            if escape is None:
                if len(raw) - position < 6:
                    break
                texts.append(raw[position])  # not JSON: keep what the model has written
                position += 1
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
            texts.append("\ufffd" if "\ud800" <= text <= "\udfff" else text)
            position = end
        self._raw = raw[position:]
        return "".join(texts)


def _parsed(raw: str, partial: Literal[False, "trailing-strings"]) -> Any:
    try:
        return from_json(raw, allow_partial=partial)
    except ValueError:
        return None


def _unescaped(escape: str) -> str:
    kind = escape[1]
    return chr(int(escape[2:], 16)) if kind == "u" else _ESCAPED.get(kind, kind)


def _joined(high: str, low: str) -> str:
    return chr(0x10000 + ((ord(high) - 0xD800) << 10) + (ord(low) - 0xDC00))
