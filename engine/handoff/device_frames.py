"""Copies frames from a window on the device straight into the pool, and verifies them afterwards.

The copy hashes what it writes, so a block holds unverified bytes until the verdict is read, between
two later steps. Therefore a frame waits while another copy writes one of its blocks, and no frame
is ever copied over a verified block: a duplicate or damaged frame cannot undo a good one. A block
that loses its owner meanwhile is safe, since its next owner writes later on the same stream.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from pdserve.engine.handoff.connection.link import DataLink
from pdserve.engine.handoff.incoming import IncomingHandoff
from pdserve.engine.handoff.protocol.frames import FrameError, FrameHeader
from pdserve.engine.handoff.protocol.layout import Piece
from pdserve.engine.kv.pages import Pages
from pdserve.engine.transport.base import DeviceSource
from pdserve.engine.transport.device import Copy


class ReceivedFrame(NamedTuple):
    """A frame at decode; `source` is where its payload lies, if that stays on a device."""

    attempt: IncomingHandoff
    link: DataLink
    header: FrameHeader
    source: DeviceSource | None = None


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A copy that the device has not finished, or whose verdict was not read yet."""

    frame: ReceivedFrame
    piece: Piece
    copy: Copy


class PagedKv(Protocol):
    def pages(self, group: int, layers: range, blocks: Sequence[int]) -> Pages: ...


class FrameVerdicts(Protocol):
    """What the Receiver does with a frame, by the verdict; called on the engine thread."""

    def accepted(self, frame: ReceivedFrame, written: Piece | None) -> None:
        """It is verified and in the pool; `written` is None if its blocks were there before."""

    def damaged(self, frame: ReceivedFrame) -> None:
        """Its payload does not fit its tag."""

    def refused(self, frame: ReceivedFrame, error: FrameError) -> None:
        """It is not a frame that this attempt may send."""

    def late(self, frame: ReceivedFrame) -> None:
        """Its attempt has ended."""


class DeviceFrames:
    """Threads of the connections call `arrived`; the engine thread calls `poll`.

    The slot of every frame is credited once: when its copy is done, or at once without a copy.
    """

    def __init__(
        self,
        kv: PagedKv,
        verdicts: FrameVerdicts,
        guarded: Callable[[IncomingHandoff, Callable[[IncomingHandoff], None]], bool],
    ) -> None:
        """`guarded(attempt, act)` returns False if the act raised, and then ends the attempt."""
        self._kv = kv
        self._verdicts = verdicts
        self._guarded = guarded
        self._waiting: deque[ReceivedFrame] = deque()
        self._pending: deque[PendingCopy] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._pending or self._waiting)

    def arrived(self, frame: ReceivedFrame) -> None:
        self._waiting.append(frame)

    def poll(self) -> bool:
        """Reads the verdicts of copies that are done, in order, and begins the copies that can
        begin. Returns whether there is more to do."""
        while self._pending and self._is_over(self._pending[0]):
            pending = self._pending.popleft()
            pending.frame.link.credit(pending.frame.header)  # an answer gives the slot back, too
            self._guarded(pending.frame.attempt, partial(self._finish, pending))
        for _ in range(len(self._waiting)):
            frame = self._waiting.popleft()
            left: list[ReceivedFrame] = []  # has the frame if it must wait
            begun = len(self._pending)
            self._guarded(frame.attempt, partial(self._begin, frame, left))
            self._waiting.extend(left)
            if not left and len(self._pending) == begun:
                frame.link.credit(frame.header)
        return self.busy

    def _is_over(self, pending: PendingCopy) -> bool:
        over: list[bool] = []
        fine = self._guarded(pending.frame.attempt, lambda _: over.append(pending.copy.done()))
        return over[0] if fine else True  # a device that fails will never say that it is done

    def _begin(
        self, frame: ReceivedFrame, left: list[ReceivedFrame], incoming: IncomingHandoff
    ) -> None:
        source = frame.source
        assert source is not None
        if incoming.bitmap is None or not incoming.state.holds:
            self._verdicts.late(frame)
            return
        try:
            piece = incoming.bitmap.piece(frame.header)
            if incoming.bitmap.has(piece):
                self._verdicts.accepted(frame, None)
                return
            if self._is_written(incoming, piece) or not source.ready():
                left.append(frame)
                return
            if incoming.bitmap.touches(piece):
                raise FrameError("it overlaps verified blocks")
        except FrameError as err:
            self._verdicts.refused(frame, err)
            return
        assert incoming.blocks is not None  # like the bitmap
        pages = self._kv.pages(piece.group, piece.layers, incoming.blocks.of(piece))
        key = incoming.peer_key.copy_key(frame.header.sequence)
        self._pending.append(PendingCopy(frame, piece, source.copy_in(pages, key)))

    def _is_written(self, incoming: IncomingHandoff, piece: Piece) -> bool:
        """Whether a copy of the same attempt writes some of the piece."""
        return any(f.frame.attempt is incoming and f.piece.overlaps(piece) for f in self._pending)

    def _finish(self, pending: PendingCopy, incoming: IncomingHandoff) -> None:
        if incoming.bitmap is None or not incoming.state.holds:
            self._verdicts.late(pending.frame)
        elif pending.copy.intact:
            self._verdicts.accepted(pending.frame, pending.piece)
        else:
            self._verdicts.damaged(pending.frame)
