"""JSON made piece by piece, so that a long answer does not block the loop or use memory twice."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic_core import to_json

AT_ONCE = 8  # items of a list written before other tasks run
PIECE_BYTES = 1 << 16  # of a long text, sent at once

T = TypeVar("T")


class JsonPieces(list[bytes | bytearray]):
    """The text of one value: all pieces, in order."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self))

    def text(self) -> bytes:
        return b"".join(self)

    def parts(self) -> Iterator[bytes]:
        """Yield the same bytes, PIECE_BYTES at a time."""
        buffer = bytearray()
        for piece in self:
            for offset in range(0, len(piece), PIECE_BYTES):
                buffer += piece[offset : offset + PIECE_BYTES]
                if len(buffer) >= PIECE_BYTES:
                    yield bytes(buffer[:PIECE_BYTES])
                    del buffer[:PIECE_BYTES]
        if buffer:
            yield bytes(buffer)


class JsonList:
    """The text of a growing list."""

    def __init__(self) -> None:
        self._items = bytearray()

    def extend(self, items: Sequence[Any]) -> None:
        """Add items, AT_ONCE at most."""
        if items:
            if self._items:
                self._items += b","
            self._items += to_json(items)[1:-1]

    def pieces(self) -> JsonPieces:
        """Return the pieces, not a copy: they grow with the list."""
        return JsonPieces((b"[", self._items, b"]"))


async def list_json(items: Sequence[T], as_object: Callable[[T], Any]) -> JsonPieces:
    """Return the text of a list of what `as_object` makes of each item."""
    text = JsonList()
    for start in range(0, len(items), AT_ONCE):
        text.extend([as_object(item) for item in items[start : start + AT_ONCE]])
        await asyncio.sleep(0)
    return text.pieces()


def object_json(fields: Mapping[str, Any]) -> JsonPieces:
    """Return the text of an object; fields that are JsonPieces are texts already."""
    pieces = JsonPieces((b"{",))
    for name, value in fields.items():
        pieces.append((b"," if len(pieces) > 1 else b"") + to_json(name) + b":")
        pieces += value if isinstance(value, JsonPieces) else (to_json(value),)
    pieces.append(b"}")
    return pieces


def array_json(texts: Iterable[JsonPieces]) -> JsonPieces:
    """Return the text of a list whose items are texts already."""
    pieces = JsonPieces((b"[",))
    for text in texts:
        if len(pieces) > 1:
            pieces.append(b",")
        pieces += text
    pieces.append(b"]")
    return pieces
