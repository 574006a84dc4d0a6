"""What all request models of OpenAI's API share: strict types, errors that name a field, schemas
for /openapi.json, and tables of how each type of entry in a chat (roles, content parts, calls,
tools) is handled.

Unknown fields are ignored and named in the debug log, as in vLLM. gateway/http/fields.py says how
known fields that are not served are handled.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from pdserve.engine.api import MAX_ENTRIES, MAX_STOP_CHARS
from pdserve.gateway.caller import MAX_SESSION, Caller
from pdserve.gateway.http.fields import (
    FIELD_ALIASES,
    IGNORED_FIELDS,
    OMITTED_FIELDS,
    OMITTED_TYPE,
    PROMPT_FIELDS,
    REFUSED_FIELDS,
    REFUSED_TYPE,
    REQUEST_FIELDS,
    SERVED_FIELDS,
    SERVED_TYPE,
    EntryTypes,
)
from pdserve.gateway.http.validation import Priority, StrictModel, parse_body
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


class Body(StrictModel):
    """Base class of the models of a request body, or of a part of one."""

    # The names in REFUSED_FIELDS that are checked.
    checked: ClassVar[Collection[str]] = PROMPT_FIELDS


class OwnedBody(Body):
    """Base class of request bodies that run a model: with the fields for usage accounting and
    priority."""

    session_id: str | None = Field(None, max_length=MAX_SESSION)
    user: Any = None
    priority: Priority | None = None

    def called_by(self, caller: Caller, request_id: str) -> Caller:
        """Return a copy of the caller for this request: with its id, and with the session under
        which its usage is counted (`session_id` or `user`)."""
        return caller.of_body(request_id, self.session_id, self.user)


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: Mapping[str, Any]) -> B:
    """Validate a request body as a model of type `kind`. Raises ServiceError INVALID_ARGUMENT that
    names the first wrong field."""
    return parse_body(
        kind,
        body,
        refused={name: REFUSED_FIELDS[name] for name in kind.checked},
        ignored=IGNORED_FIELDS | REQUEST_FIELDS | (REFUSED_FIELDS.keys() - set(kind.checked)),
        instead={
            name: other for name, other in FIELD_ALIASES.items() if other in kind.model_fields
        },
        left_out=OMITTED_FIELDS,
        of_other_routes=SERVED_FIELDS,
    )


def ids(max_items: int) -> dict[str, Any]:
    """Return the JSON schema of a field that is one prompt of token ids, or a list of at most
    `max_items` such prompts."""
    return {"anyOf": [_IDS, {"type": "array", "items": _IDS, "minItems": 1, "maxItems": max_items}]}


def texts_or_ids(max_items: int) -> dict[str, Any]:
    """Return the JSON schema of a field that is a text, a list of token ids, or a list of at most
    `max_items` of either."""
    texts = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": max_items}
    return {"anyOf": [TEXT, texts, *ids(max_items)["anyOf"]]}


def completion(schema: dict[str, Any]) -> None:
    """Add the limits of sampling parameters to the JSON schema of a chat or completion body, in
    place."""
    bounded(schema)
    if "echo" in schema["properties"]:  # max_tokens 0 is valid only for an echo
        schema["properties"]["max_tokens"]["anyOf"][0]["minimum"] = 0
        schema["oneOf"] = [{"required": ["prompt"]}, {"required": ["prompt_token_ids"]}]


ROLES: EntryTypes = dict.fromkeys(
    ("system", "developer", "user", "assistant", "tool", "function"), SERVED_TYPE
)
# A part whose type is not listed is dropped from a message of the assistant, and refused elsewhere.
PARTS: EntryTypes = {
    **dict.fromkeys(("text", "input_text", "output_text", "refusal"), SERVED_TYPE),
    "thinking": SERVED_TYPE,  # from the assistant
    **dict.fromkeys(("image_url", "input_audio", "file", "video_url"), REFUSED_TYPE),
}
CALLS: EntryTypes = {"function": SERVED_TYPE, "custom": SERVED_TYPE}
# A tool whose type is not listed belongs to a provider, and is left out.
TOOLS: EntryTypes = {
    "function": SERVED_TYPE,
    "custom": SERVED_TYPE,
    **dict.fromkeys(("web_search", "code_interpreter", "builtin_function", "mcp"), OMITTED_TYPE),
}
# The modes may be objects that have only their type; "any" is another name of "required".
TOOL_CHOICES: EntryTypes = dict.fromkeys(
    ("none", "auto", "required", "any", "function", "custom", "allowed_tools"), SERVED_TYPE
)

UNIONS: dict[str, EntryTypes] = {
    "roles": ROLES,
    "content parts": PARTS,
    "calls": CALLS,
    "tools": TOOLS,
    "tool choices": TOOL_CHOICES,
}
