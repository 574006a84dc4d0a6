"""The blocks at decode that frames are written into, from the grant until the attempt loses them.

A frame is written under a lock: on its connection's thread, or by a copy on the device that the
copying thread begins. Freeing the blocks takes the same lock first and waits for the copies that
run, so nothing is ever written into blocks that have a new owner. That takes one frame at most on
the host, a fraction of a millisecond, or a few if pages of the pool are touched for the first time;
on a device as long as copies that were begun before, and the steps that these wait for.

A copy hashes what it writes, so its blocks hold unverified bytes until its verdict is read.
Therefore a frame waits while another copy writes one of its blocks, and no frame is ever copied
over a verified block: a duplicate or damaged frame cannot undo a good one.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from pdserve.engine.handoff.protocol.frames import FrameError, FrameHeader
from pdserve.engine.handoff.protocol.layout import Bitmap, Piece
from pdserve.engine.kv.pages import Pages
from pdserve.engine.kv.spec import KvSpec
from pdserve.engine.transport.base import DeviceSource
from pdserve.engine.transport.device import Copy, DeviceError

log = logging.getLogger(__name__)


class PagedKv(Protocol):
    def pages(self, group: int, layers: range, blocks: Sequence[int], ready: Any) -> Pages: ...


class WritableKv(PagedKv, Protocol):
    spec: KvSpec

    def write(
        self, group: int, layers: range, blocks: Sequence[int], payload: memoryview
    ) -> None: ...
    def ready(self) -> Any: ...


class BlocksLeft(Exception):
    """The blocks are not this attempt's any more."""


class FrameCopy(NamedTuple):
    """A copy on the device; None: all of the piece was there before."""

    piece: Piece
    copy: Copy | None


class OpenBlocks:
    """The blocks of one attempt. One thread writes into them: that of its connection, or the one
    that copies on the device."""

    def __init__(self, tables: Sequence[Sequence[int]], empty: Bitmap, ready: Any = None) -> None:
        """`tables`: per layer group, the block of the pool for every logical block. `ready`: on a
        device the event behind what was launched for the blocks' last owners."""
        self._tables = tables
        self._ready = ready
        self._inside = empty  # under the lock
        self._copies: list[FrameCopy] = []  # begun, and their verdicts not read; under the lock
        self._open = True  # under the lock
        self._lock = threading.Lock()
        self.num_leading = empty.num_leading  # leading blocks that all layers of all groups have

    def write(self, kv: WritableKv, header: FrameHeader, payload: memoryview) -> Piece | None:
        """Writes a verified frame; returns None if all of it was there before.

        Raises BlocksLeft, and FrameError if it does not fit or overlaps what is there.
        """
        with self._lock:
            piece = self._piece(header)
            if self._inside.has(piece):
                return None
            if self._inside.touches(piece):
                raise FrameError("it overlaps verified blocks")
            kv.write(piece.group, piece.layers, self._blocks(piece), payload)
            self._add(piece)
            return piece

    def begin_copy(
        self, kv: PagedKv, header: FrameHeader, source: DeviceSource, key: bytes
    ) -> FrameCopy | None:
        """Begins to copy a frame on the device. None: it has to wait, for prefill's copy or for
        another one into its blocks. Raises like `write`, and DeviceError."""
        with self._lock:
            piece = self._piece(header)
            if self._inside.has(piece):
                return FrameCopy(piece, None)
            if any(other.piece.overlaps(piece) for other in self._copies) or not source.ready():
                return None
            if self._inside.touches(piece):
                raise FrameError("it overlaps verified blocks")
            pages = kv.pages(piece.group, piece.layers, self._blocks(piece), self._ready)
            begun = FrameCopy(piece, source.copy_in(pages, key))
            self._copies.append(begun)
            return begun

    def end_copy(self, done: FrameCopy) -> None:
        """A copy is done; what is intact is there from now on. Raises BlocksLeft."""
        with self._lock:
            if not self._open:
                raise BlocksLeft
            self._copies.remove(done)
            if done.copy is not None and done.copy.intact:
                self._add(done.piece)

    def close(self) -> None:
        """From now on nothing is written."""
        with self._lock:
            self._open = False
            copies, self._copies = self._copies, []
        for begun in copies:
            try:
                assert begun.copy is not None
                begun.copy.wait()
            except DeviceError:
                log.exception("a copy on the device failed")

    def _piece(self, header: FrameHeader) -> Piece:
        if not self._open:
            raise BlocksLeft
        return self._inside.piece(header)

    def _blocks(self, piece: Piece) -> Sequence[int]:
        """The blocks of the pool that a piece goes into."""
        return self._tables[piece.group][piece.blocks.start : piece.blocks.stop]

    def _add(self, piece: Piece) -> None:
        self._inside.add(piece)
        self.num_leading = self._inside.num_leading
