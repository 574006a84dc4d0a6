"""Schemas for /openapi.json of what a body's own types do not express."""

from typing import Any

from pdserve.engine.api.sampling_bounds import MAX_ENTRIES, MAX_STOP_CHARS
from pdserve.gateway.sampling import bounded

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


def ids(max_items: int) -> dict[str, Any]:
    """Return the schema of token ids, or of a list of at most `max_items` prompts of them."""
    return {"anyOf": [_IDS, {"type": "array", "items": _IDS, "minItems": 1, "maxItems": max_items}]}


def texts_or_ids(max_items: int) -> dict[str, Any]:
    """Return the schema of a text, token ids, or a list of at most `max_items` of either."""
    texts = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": max_items}
    return {"anyOf": [TEXT, texts, *ids(max_items)["anyOf"]]}


def completion(schema: dict[str, Any]) -> None:
    """Write the sampling bounds into the schema of a chat or completion."""
    bounded(schema)
    if "echo" in schema["properties"]:  # max_tokens 0 is valid only for an echo
        schema["properties"]["max_tokens"]["anyOf"][0]["minimum"] = 0
        schema["oneOf"] = [{"required": ["prompt"]}, {"required": ["prompt_token_ids"]}]
