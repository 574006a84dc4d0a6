"""Chunks of a stream that have only text, as most do. Only their texts differ."""

from collections.abc import Callable
from typing import Any

from pydantic_core import to_json

from pdserve.gateway.http.answers.direct_write import DirectWrite
from pdserve.gateway.http.answers.json_text import JsonPieces

MAX_DIRECT_CHARS = 1024
_TEXT = "\0text\0"  # occurs in no other field


class TextChunk:
    """Maker of the chunks of one choice, from a template: what `chunk` makes of a text."""

    def __init__(self, chunk: Callable[[str], dict[str, Any]]) -> None:
        self._prefix, self._suffix = to_json(chunk(_TEXT)).split(to_json(_TEXT))

    def of(self, text: str) -> JsonPieces:
        return JsonPieces((self._prefix, to_json(text), self._suffix))

    def write(self, text: str, direct: DirectWrite) -> bool:
        """Send the event of a chunk at once; False if that is not possible. A long text goes the
        usual way, since it may be held and must then be counted."""
        if len(text) > MAX_DIRECT_CHARS:
            return False
        return direct.write(b"data: %b%b%b\n\n" % (self._prefix, to_json(text), self._suffix))
