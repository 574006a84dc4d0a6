"""What a body's own types do not say, for its description in /openapi.json."""

import math
from typing import Any

from pdserve.engine.api.sampling_bounds import BOUNDS, MAX_ENTRIES, MAX_STOP_CHARS

TEXT: dict[str, Any] = {"type": "string"}
STOP: dict[str, Any] = {
    "anyOf": [
        {**TEXT, "minLength": 1, "maxLength": MAX_STOP_CHARS},
        {
            "type": "array",
            "items": {**TEXT, "minLength": 1, "maxLength": MAX_STOP_CHARS},
            "maxItems": MAX_ENTRIES["stop"],
        },
        {"type": "null"},
    ]
}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT},
    "required": ["type", "text"],
}
CONTENT: dict[str, Any] = {
    "anyOf": [TEXT, {"type": "array", "items": _TEXT_PART, "minItems": 1}, {"type": "null"}]
}
# Fields with the bounds of another name.
_BOUNDED_AS = {"top_logprobs": "logprobs", "max_completion_tokens": "max_tokens", "best_of": "n"}


def texts_or_ids(most: int) -> dict[str, Any]:
    """A text, token ids, or a list of either with at most so many."""
    return {
        "anyOf": [
            TEXT,
            {"type": "array", "items": TEXT, "minItems": 1, "maxItems": most},
            _IDS,
            {"type": "array", "items": _IDS, "minItems": 1, "maxItems": most},
        ]
    }


def bounded(schema: dict[str, Any]) -> None:
    """Writes the bounds of sampling into the description of a body."""
    for name, field in schema["properties"].items():
        bounds = BOUNDS.get(_BOUNDED_AS.get(name, name))
        for kind in field.get("anyOf", ()):
            if bounds is None or kind.get("type") not in ("integer", "number"):
                continue
            kind["exclusiveMinimum" if bounds.api.open_low else "minimum"] = bounds.api.low
            if bounds.api.high < math.inf:
                kind["maximum"] = bounds.api.high
    if "echo" in schema["properties"]:  # max_tokens 0 is that of an echo alone
        schema["properties"]["max_tokens"]["anyOf"][0]["minimum"] = 0
