"""The blocks at decode that frames are written into, from the grant until the attempt loses them.

A frame is written on its connection's thread, under a lock. Freeing the blocks takes the same lock
first, so nothing is ever written into blocks that have a new owner. Freeing waits for one frame at
most: a fraction of a millisecond, or a few if pages of the pool are touched for the first time.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

from pdserve.engine.handoff.protocol.frames import FrameError, FrameHeader
from pdserve.engine.handoff.protocol.layout import Bitmap, Piece
from pdserve.engine.kv.pages import Pages
from pdserve.engine.kv.spec import KvSpec


class WritableKv(Protocol):
    spec: KvSpec

    def write(
        self, group: int, layers: range, blocks: Sequence[int], payload: memoryview
    ) -> None: ...
    def pages(self, group: int, layers: range, blocks: Sequence[int]) -> Pages: ...


class BlocksLeft(Exception):
    """The blocks are not this attempt's any more."""


class OpenBlocks:
    """The blocks of one attempt. Only the thread of its connection writes into them."""

    def __init__(self, tables: Sequence[Sequence[int]], empty: Bitmap) -> None:
        """`tables`: per layer group, the block of the pool for every logical block."""
        self._tables = tables
        self._inside = empty  # under the lock
        self._open = True  # under the lock
        self._lock = threading.Lock()
        self.num_leading = empty.num_leading  # leading blocks that all layers of all groups have

    def of(self, piece: Piece) -> Sequence[int]:
        """The blocks of the pool that a piece goes into."""
        return self._tables[piece.group][piece.blocks.start : piece.blocks.stop]

    def write(self, kv: WritableKv, header: FrameHeader, payload: memoryview) -> Piece | None:
        """Writes a verified frame; returns None if all of it was there before.

        Raises BlocksLeft, and FrameError if it does not fit or overlaps what is there.
        """
        with self._lock:
            if not self._open:
                raise BlocksLeft
            piece = self._inside.piece(header)
            if self._inside.has(piece):
                return None
            if self._inside.touches(piece):
                raise FrameError("it overlaps verified blocks")
            kv.write(piece.group, piece.layers, self.of(piece), payload)
            self._inside.add(piece)
            self.num_leading = self._inside.num_leading
            return piece

    def close(self) -> None:
        """From now on nothing is written."""
        with self._lock:
            self._open = False
