"""Converts argument values from JSON and Python notation to JSON values; pure.

pydantic_core reads JSON and bounds the depth; this module reads Python literals.
"""

import json
import re
from itertools import chain
from typing import Any

from pydantic_core import from_json

from pdserve.gateway.text.parsing.reader import Malformed

MAX_DEPTH = 64
MAX_VALUES = 2048  # of a text in Python notation: a few milliseconds

_DIGITS = r"[0-9](?:_?[0-9])*"
_BASED = r"0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+"
_NUMBER = re.compile(
    rf"[+-]?(?:(?P<based>{_BASED})"
    rf"|(?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?)"
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_SPACE = re.compile(r"\s*")
_WORDS = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
_PYTHON_STRING = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|.)", re.DOTALL)
_CONTROL = re.compile(r"[\0-\x1f]")
# Also matches an unterminated string up to the end of the text, so that no character is read twice.
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


def json_value(text: str) -> Any:
    """Parse JSON; strings may contain bare control characters, since models write line breaks.
    Raises Malformed if the text is not JSON or is nested too deeply."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        escaped = _JSON_STRING.sub(_without_controls, text) if _CONTROL.search(text) else text
        if escaped == text:
            raise Malformed from None
    try:
        return from_json(escaped, allow_inf_nan=False)
    except ValueError:
        raise Malformed from None


def depth_of(value: Any) -> int:
    """Return the nesting depth of lists and objects in a value."""
    depth = 0
    layer = [value]
    while containers := [one for one in layer if isinstance(one, (dict, list))]:
        depth += 1
        members = (one.values() if isinstance(one, dict) else one for one in containers)
        layer = [*chain.from_iterable(members)]
    return depth


def _without_controls(string: re.Match[str]) -> str:
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", string[0])


def json_text(value: Any) -> str:
    """Serialize a value for the arguments of a call. Raises Malformed if it has no JSON form."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise Malformed from None


def word_value(text: str) -> str:
    """Convert a number, or a name such as True or null, to JSON. Raises Malformed."""
    if number := _NUMBER.fullmatch(text):
        return json_text(_number(number))
    if text not in _WORDS:
        raise Malformed
    return json_text(_WORDS[text])


def _number(number: re.Match[str]) -> int | float:
    try:
        return int(number[0], 0 if number["based"] else 10)
    except ValueError:
        return float(number[0])  # also for an int with too many digits


class Literals:
    """Reads Python literals from a text."""

    def __init__(self, text: str, at: int = 0, max_values: int = MAX_VALUES) -> None:
        self.text = text
        self.at = at
        self.num_values = 0  # read so far
        self._max_values = max_values

    def whole(self) -> Any:
        """Read the text as a single value. Raises Malformed."""
        value = self.value()
        self.space()
        if self.at < len(self.text):
            raise Malformed
        return value

    def value(self, depth: int = 0) -> Any:
        """Read the next value. Raises Malformed."""
        self.num_values += 1
        if depth > MAX_DEPTH or self.num_values > self._max_values:
            raise Malformed
        self.space()
        first = self.text[self.at : self.at + 1]
        if first == "{":
            return self._object(depth + 1)
        if first in ("[", "(") and first:
            return self._list("]" if first == "[" else ")", depth + 1)
        if (text := self.string()) is not None:
            return text
        if number := _NUMBER.match(self.text, self.at):
            self.at = number.end()
            return _number(number)
        word = _NAME.match(self.text, self.at)
        if word is None or word[0] not in _WORDS:
            raise Malformed
        self.at = word.end()
        return _WORDS[word[0]]

    def string(self) -> str | None:
        """Read the string that begins here; return None if none does."""
        found = _PYTHON_STRING.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return _ESCAPE.sub(_unescaped, found[1] if found[1] is not None else found[2])

    def space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        assert found is not None  # the pattern also matches ""
        self.at = found.end()

    def taken(self, mark: str) -> bool:
        """Read white space, and the mark if it follows; return whether it did."""
        self.space()
        found = self.text.startswith(mark, self.at)
        self.at += len(mark) if found else 0
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        self.at += 1
        made: dict[str, Any] = {}
        while not self.taken("}"):
            self.space()
            key = self.string()
            if key is None or not self.taken(":"):
                raise Malformed
            made[key] = self.value(depth)
            if not self.taken(","):
                if not self.taken("}"):
                    raise Malformed
                break
        return made

    def _list(self, end: str, depth: int) -> list[Any]:
        self.at += 1
        made: list[Any] = []
        while not self.taken(end):
            made.append(self.value(depth))
            if not self.taken(","):
                if not self.taken(end):
                    raise Malformed
                break
        return made


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) > 1:
        value = int(code[1:], 16)
        return chr(value) if value < 0x110000 and not 0xD800 <= value < 0xE000 else found[0]
    return _ESCAPED.get(code, code if code in "\\'\"" else found[0])
