"""Chunks that have nothing but text, which most of a stream's have: written once, but for it."""

from collections.abc import Callable
from typing import Any

from pydantic_core import to_json

from pdserve.gateway.choice import Delta
from pdserve.gateway.http.answers.json_text import JsonPieces
from pdserve.gateway.text.parts import TextPart

_TEXT = "\0text\0"  # in no other field


class TextChunk:
    """Those of one choice; `chunk` makes one of a text."""

    def __init__(self, chunk: Callable[[str], dict[str, Any]]) -> None:
        self._before, self._behind = to_json(chunk(_TEXT)).split(to_json(_TEXT))

    def of(self, text: str) -> JsonPieces:
        return JsonPieces((self._before, to_json(text), self._behind))

    def event(self, text: str) -> bytes:
        """A server-sent event of a short text."""
        return b"data: %b%b%b\n\n" % (self._before, to_json(text), self._behind)


def only_text(delta: Delta) -> str:
    """The text of a delta that has nothing else and ends nothing; empty if it has, or does."""
    if delta.finish is None and len(delta.content) == 1:
        part = delta.content[0]
        if isinstance(part, TextPart):
            return part.text
    return ""
