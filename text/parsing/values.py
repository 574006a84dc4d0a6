"""Converts values of tool call arguments between JSON text, Python notation and Python objects;
pure.

pydantic_core parses the JSON and limits its depth.
"""

import json
import re
from itertools import chain
from typing import Any

from pydantic_core import from_json

from pdserve.text.parsing.reader import Malformed

MAX_VALUE_DEPTH = 64
MAX_VALUES = 2048  # of a text in Python notation: a few milliseconds

_DIGITS = r"[0-9](?:_?[0-9])*"
_BASED = r"0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+"
_NUMBER = re.compile(
    rf"[+-]?(?:(?P<based>{_BASED})"
    rf"|(?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?)"
)
_WORDS = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
_CONTROL = re.compile(r"[\0-\x1f]")
# Also matches an unterminated string up to the end of the text, so that no character is read twice.
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)


def json_value(text: str) -> Any:
    """Parse a JSON text. Strings may contain control characters such as line breaks, which models
    often write unescaped. Raises Malformed if the text is not JSON or is nested too deeply."""
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
    """Return how deeply lists and objects are nested in a value; 0 for a value that is neither."""
    depth = 0
    layer = [value]
    while containers := [item for item in layer if isinstance(item, (dict, list))]:
        depth += 1
        members = (item.values() if isinstance(item, dict) else item for item in containers)
        layer = [*chain.from_iterable(members)]
    return depth


def _without_controls(string: re.Match[str]) -> str:
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", string[0])


def json_text(value: Any) -> str:
    """Serialize a value as JSON for the arguments of a call. Raises Malformed if it has no JSON
    form."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise Malformed from None


def word_value(text: str) -> str:
    """Convert a number in Python notation, or a name such as True or null, to JSON text. Raises
    Malformed for any other text."""
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
