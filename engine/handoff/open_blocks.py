"""The blocks at decode that an attempt's frames are written into, from the grant of its Claim until
the attempt loses them.

A frame is written under a lock: by its connection's thread, or by a device copy that the copying
thread begins. Freeing the blocks takes the same lock first and waits for the running copies, so no
frame is ever written into blocks that have a new owner. On the host, that wait is at most as long
as one frame: a fraction of a millisecond, or a few milliseconds if pages of the pool are touched
for the first time. On a device it lasts as long as the copies that have begun and the steps that
they wait for.

A device copy hashes what it writes, so its blocks hold unverified bytes until its result is read.
Therefore a frame waits while another copy writes one of its blocks, and no frame is ever copied
over a verified block: a duplicate or damaged frame cannot undo a good one.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from pdserve.engine.handoff.protocol import Bitmap, FrameError, FrameHeader, Piece
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.transport import Copy, DeviceError, DeviceSource

log = logging.getLogger(__name__)


class BlocksReleased(Exception):
    """Raised on a write into the blocks of an attempt that has lost them."""


class FrameCopy(NamedTuple):
    """A frame's copy into the blocks on the device; `copy` is None if all of its piece was present
    before."""

    piece: Piece
    copy: Copy | None


class OpenBlocks:
    """The blocks of one incoming attempt while frames are written into them. Exactly one thread
    writes: the connection's thread, or the thread that copies on the device."""

    def __init__(self, tables: Sequence[Sequence[int]], empty: Bitmap, ready: Any = None) -> None:
        """Open blocks for writing.

        `tables`: for each layer group, the pool block of every logical block. `empty`: a Bitmap
        without written cells. `ready`: on a device, the event that follows all work which was
        launched for the blocks' previous owners.
        """
        self._tables = tables
        self._ready = ready
        self._written = empty  # under the lock
        self._copies: list[FrameCopy] = []  # begun, verdict not read yet; under the lock
        self._open = True  # under the lock
        self._lock = threading.Lock()
        self.num_leading = empty.num_leading  # leading blocks that all layers of all groups have

    def write(self, kv: KvCache, header: FrameHeader, payload: memoryview) -> Piece | None:
        """Write a verified frame into the blocks and return what it wrote; None if all of it was
        present before.

        Raises BlocksReleased if the blocks are closed, and FrameError if the frame does not fit or
        overlaps verified blocks.
        """
        with self._lock:
            piece = self._piece(header)
            if self._written.has(piece):
                return None
            if self._written.touches(piece):
                raise FrameError("the frame overlaps verified blocks")
            kv.write(piece.group, piece.layers, self._blocks(piece), payload)
            self._add(piece)
            return piece

    def begin_copy(
        self, kv: KvCache, header: FrameHeader, source: DeviceSource, key: bytes
    ) -> FrameCopy | None:
        """Begin to copy a frame from a device slot into the blocks.

        Return None if the frame has to wait: prefill's copy into the slot is not done, or another
        copy writes one of the same blocks. Raises like `write`, and DeviceError.
        """
        with self._lock:
            piece = self._piece(header)
            if self._written.has(piece):
                return FrameCopy(piece, None)
            if any(other.piece.overlaps(piece) for other in self._copies) or not source.ready():
                return None
            if self._written.touches(piece):
                raise FrameError("the frame overlaps verified blocks")
            pages = kv.pages(piece.group, piece.layers, self._blocks(piece), self._ready)
            frame_copy = FrameCopy(piece, source.copy_in(pages, key))
            self._copies.append(frame_copy)
            return frame_copy

    def end_copy(self, frame_copy: FrameCopy) -> None:
        """Record a copy that is done; its blocks count as written if the copied bytes match their
        tag. Raises BlocksReleased if the blocks are closed."""
        with self._lock:
            if not self._open:
                raise BlocksReleased
            self._copies.remove(frame_copy)
            if frame_copy.copy is not None and frame_copy.copy.intact:
                self._add(frame_copy.piece)

    def close(self) -> None:
        """Refuse further writes and wait for the running copies."""
        with self._lock:
            self._open = False
            copies, self._copies = self._copies, []
        for frame_copy in copies:
            try:
                assert frame_copy.copy is not None
                frame_copy.copy.wait()
            except DeviceError:
                log.exception("a device copy into the blocks of a hand-off failed")

    def _piece(self, header: FrameHeader) -> Piece:
        if not self._open:
            raise BlocksReleased
        return self._written.piece(header)

    def _blocks(self, piece: Piece) -> Sequence[int]:
        """Return the numbers of the pool blocks into which a piece is written."""
        return self._tables[piece.group][piece.blocks.start : piece.blocks.stop]

    def _add(self, piece: Piece) -> None:
        self._written.add(piece)
        self.num_leading = self._written.num_leading
