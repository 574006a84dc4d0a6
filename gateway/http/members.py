"""How each member of the clients' unions is handled: roles, parts of a content, tools, items.

Each API has a table of them, `members.py` in its folder, which its code uses and from which
docs/api.md is generated. Pure except for logging.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic_core import to_json

from pdserve.services.common.errors import MAX_QUOTED, cut

log = logging.getLogger("pdserve.gateway.requests")

MAX_DEPTH = 16  # of a value that is kept as text
# Keys whose values only their provider can read, or that mean nothing to a model.
_OPAQUE = {"signature", "cache_control", "citations", "call_id", "tool_use_id", "data", "image_url"}


class Handling(StrEnum):
    """How a member is handled."""

    SERVED = "served"
    LEFT_OUT = "left out and logged"  # offered to the model, and cannot run here
    AS_TEXT = "kept as text"  # history
    DROPPED = "dropped and logged"  # history that means nothing to a model here
    HINT = "accepted"  # changes no answer
    REFUSED = "refused by name"  # would change the answer, and is not supported


@dataclass(frozen=True, slots=True)
class EntryType:
    """One member. `text`: the fields of history that are kept. `of_client`: the client wrote it,
    otherwise the model or its provider."""

    fate: Handling
    text: tuple[str, ...] = ()
    of_client: bool = False

    def as_text(self, kind: str, value: Mapping[str, Any]) -> str:
        """Return the text of an entry of history: its kind, and its kept fields."""
        values = {name: _readable(value[name], MAX_DEPTH) for name in self.text if name in value}
        lines = [
            item if isinstance(item, str) else to_json(item).decode()
            for item in values.values()
            if item not in (None, "", [], {})
        ]
        return "\n".join([f"[{kind}]", *lines])


EntryTypes = Mapping[str, EntryType]

SERVED_TYPE, OMITTED_TYPE, ACCEPTED_TYPE = (
    EntryType(Handling.SERVED),
    EntryType(Handling.LEFT_OUT),
    EntryType(Handling.HINT),
)
DROPPED_TYPE, REFUSED_TYPE = EntryType(Handling.DROPPED), EntryType(Handling.REFUSED)


def kept_as_text(*fields: str, of_client: bool = False) -> EntryType:
    """Return a member of history that is kept as text."""
    return EntryType(Handling.AS_TEXT, fields, of_client)


def log_unsupported(fate: Handling, subject: str, kinds: Iterable[str]) -> None:
    """Log what is left out or dropped from a request."""
    if names := sorted(set(kinds)):
        log.info(
            "a request has unsupported entries, %s: %s",
            fate.value,
            cut(f"{subject} {', '.join(map(repr, names))}", MAX_QUOTED),
        )


def _readable(value: Any, depth: int) -> Any:
    """Return a value without what only its provider can read; join the texts of text parts."""
    if isinstance(value, Mapping):
        if not depth:
            return None
        if value.get("type") in ("text", "input_text", "output_text", "summary_text"):
            return value.get("text")
        return {
            name: _readable(item, depth - 1)
            for name, item in value.items()
            if name not in _OPAQUE and not name.startswith("encrypted_")
        }
    if isinstance(value, list | tuple):
        if not depth:
            return None
        values = [_readable(item, depth - 1) for item in value]
        texts = values and all(isinstance(item, str) for item in values)
        return "\n".join(values) if texts and isinstance(value[0], Mapping) else values
    return value
