"""The blocks at decode that frames are written into, from the grant until the attempt loses them.

A frame is written under a lock: by its connection's thread, or by a device copy that the copying
thread begins. Freeing the blocks takes the same lock first and waits for the running copies, so
nothing is ever written into blocks that have a new owner. That wait lasts at most one frame on the
host: a fraction of a millisecond, or a few if pages of the pool are touched for the first time. On
a device it lasts as long as the copies that have begun and the steps that they wait for.

A copy hashes what it writes, so its blocks hold unverified bytes until its verdict is read.
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
    """Raised if the attempt has lost its blocks."""


class FrameCopy(NamedTuple):
    """A copy on the device; `copy` is None if the whole piece was present before."""

    piece: Piece
    copy: Copy | None


class OpenBlocks:
    """The blocks of one attempt. Exactly one thread writes into them: its connection's thread, or
    the one that copies on the device."""

    def __init__(self, tables: Sequence[Sequence[int]], empty: Bitmap, ready: Any = None) -> None:
        """`tables`: per layer group, the pool block of every logical block. `ready`: on a device,
        the event after the work that was launched for the blocks' previous owners."""
        self._tables = tables
        self._ready = ready
        self._written = empty  # under the lock
        self._copies: list[FrameCopy] = []  # begun, verdict not read yet; under the lock
        self._open = True  # under the lock
        self._lock = threading.Lock()
        self.num_leading = empty.num_leading  # leading blocks that all layers of all groups have

    def write(self, kv: KvCache, header: FrameHeader, payload: memoryview) -> Piece | None:
        """Write a verified frame; return None if all of it was present before.

        Raises BlocksReleased, and FrameError if the frame does not fit or overlaps verified blocks.
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
        """Begin to copy a frame on the device.

        Return None if the frame has to wait: for prefill's copy or for another copy into its
        blocks. Raises like `write`, and DeviceError.
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
        """Record a finished copy, which counts as written if it is intact. Raises
        BlocksReleased."""
        with self._lock:
            if not self._open:
                raise BlocksReleased
            self._copies.remove(frame_copy)
            if frame_copy.copy is not None and frame_copy.copy.intact:
                self._add(frame_copy.piece)

    def close(self) -> None:
        """Forbid further writes and wait for the running copies."""
        with self._lock:
            self._open = False
            copies, self._copies = self._copies, []
        for frame_copy in copies:
            try:
                assert frame_copy.copy is not None
                frame_copy.copy.wait()
            except DeviceError:
                log.exception("a copy on the device failed")

    def _piece(self, header: FrameHeader) -> Piece:
        if not self._open:
            raise BlocksReleased
        return self._written.piece(header)

    def _blocks(self, piece: Piece) -> Sequence[int]:
        """Return the pool blocks that a piece goes into."""
        return self._tables[piece.group][piece.blocks.start : piece.blocks.stop]

    def _add(self, piece: Piece) -> None:
        self._written.add(piece)
        self.num_leading = self._written.num_leading
