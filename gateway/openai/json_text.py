"""JSON made piece by piece, so that no long answer holds up the loop."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic_core import to_json

AT_ONCE = 8  # items of a list that are written before others have the loop

T = TypeVar("T")


async def list_json(items: Sequence[T], described: Callable[[T], Any]) -> bytes:
    """The text of a list of what `described` makes of each item."""
    pieces = []
    for at in range(0, len(items), AT_ONCE):
        pieces.append(to_json([described(item) for item in items[at : at + AT_ONCE]])[1:-1])
        await asyncio.sleep(0)
    return b"[%s]" % b",".join(pieces)


def object_json(fields: Mapping[str, Any]) -> bytes:
    """The text of an object; fields that are bytes are texts of JSON already."""
    pieces = (
        to_json(name) + b":" + (value if isinstance(value, bytes) else to_json(value))
        for name, value in fields.items()
    )
    return b"{%s}" % b",".join(pieces)


def array_json(texts: Iterable[bytes]) -> bytes:
    """The text of a list whose items are texts of JSON."""
    return b"[%s]" % b",".join(texts)
