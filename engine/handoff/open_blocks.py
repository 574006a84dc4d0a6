"""decode: blocks of the pool that frames are written into, from the grant until they leave.

A frame is written on its connection's thread, under the lock; freeing the blocks takes the same
lock first, so nothing is ever written into blocks that have a new owner. Whoever frees waits for
one frame at most: a fraction of a millisecond, or some if pages of the pool are touched first.
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
    num_blocks: int

    def write(
        self, group: int, layers: range, blocks: Sequence[int], payload: memoryview
    ) -> None: ...
    def pages(self, group: int, layers: range, blocks: Sequence[int]) -> Pages: ...


class BlocksLeft(Exception):
    """They are not this attempt's any more."""


class OpenBlocks:
    """Of one attempt. One thread writes, that of its connection."""

    def __init__(self, tables: Sequence[Sequence[int]], empty: Bitmap) -> None:
        """`tables`: per layer group, of every logical block the block of the pool."""
        self._tables = tables
        self._inside = empty  # under the lock
        self._open = True  # under the lock
        self._lock = threading.Lock()
        self.num_leading = empty.num_leading  # blocks that every layer of every group has

    def of(self, piece: Piece) -> Sequence[int]:
        """The blocks of the pool that a piece goes into."""
        return self._tables[piece.group][piece.blocks.start : piece.blocks.stop]

    def write(self, kv: WritableKv, header: FrameHeader, payload: memoryview) -> Piece | None:
        """Take in a frame that is verified; None: all of it was there before. Raises BlocksLeft,
        and FrameError if it does not fit."""
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
        """They are about to leave: nothing is written any more."""
        with self._lock:
            self._open = False
