"""Frames that go from a window on the device straight into the pool: begun, then verified.

The copy hashes what it writes, so a block holds unverified bytes until the verdict is read, between
two later steps. Therefore a frame waits while another copy writes one of its blocks, and none is
ever copied over a verified block: a duplicate or damaged frame cannot undo a good one. A block that
loses its owner meanwhile is safe, since its next owner writes later on the same stream.
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
    """A frame at decode; `inlet`: where its payload lies, if that stays on a device."""

    attempt: IncomingHandoff
    link: DataLink
    header: FrameHeader
    inlet: DeviceSource | None = None


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A copy that the device has been given."""

    parcel: ReceivedFrame
    piece: Piece
    copy: Copy


class PagedKv(Protocol):
    def pages(self, group: int, layers: range, blocks: Sequence[int]) -> Pages: ...


class FrameTaker(Protocol):
    """The Receiver, for what becomes of a frame; on the engine thread."""

    def took(self, parcel: ReceivedFrame, written: Piece | None) -> None:
        """Verified and in the pool; None: its blocks had been before."""

    def damaged(self, parcel: ReceivedFrame) -> None: ...
    def refused(self, parcel: ReceivedFrame, error: FrameError) -> None: ...
    def late(self, parcel: ReceivedFrame) -> None: ...


class DeviceFrames:
    """Threads of the connections call `arrived`; the engine thread calls `poll`. Every frame's slot
    is credited once: when its copy is done, or when there is none."""

    def __init__(
        self,
        kv: PagedKv,
        taker: FrameTaker,
        guarded: Callable[[IncomingHandoff, Callable[[IncomingHandoff], None]], bool],
    ) -> None:
        """`guarded`: False if the act raised; its attempt ends then."""
        self._kv = kv
        self._taker = taker
        self._guarded = guarded
        self._waiting: deque[ReceivedFrame] = deque()
        self._flights: deque[PendingCopy] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._flights or self._waiting)

    def arrived(self, parcel: ReceivedFrame) -> None:
        self._waiting.append(parcel)

    def poll(self) -> bool:
        """Read the verdicts of copies that are done, in order, and begin what can begin. Whether
        there is more to do."""
        while self._flights and self._is_over(self._flights[0]):
            flight = self._flights.popleft()
            flight.parcel.link.credit(flight.parcel.header)  # an answer gives the slot back, too
            self._guarded(flight.parcel.attempt, partial(self._land, flight))
        for _ in range(len(self._waiting)):
            parcel = self._waiting.popleft()
            left: list[ReceivedFrame] = []  # the frame, if it has to wait
            begun = len(self._flights)
            self._guarded(parcel.attempt, partial(self._begin, parcel, left))
            self._waiting.extend(left)
            if not left and len(self._flights) == begun:
                parcel.link.credit(parcel.header)
        return self.busy

    def _is_over(self, flight: PendingCopy) -> bool:
        over: list[bool] = []
        fine = self._guarded(flight.parcel.attempt, lambda _: over.append(flight.copy.done()))
        return over[0] if fine else True  # a device that fails does not become done

    def _begin(
        self, parcel: ReceivedFrame, left: list[ReceivedFrame], incoming: IncomingHandoff
    ) -> None:
        inlet = parcel.inlet
        assert inlet is not None
        if incoming.bitmap is None or not incoming.state.holds:
            self._taker.late(parcel)
            return
        try:
            piece = incoming.bitmap.piece(parcel.header)
            if incoming.bitmap.has(piece):
                self._taker.took(parcel, None)
                return
            if self._is_written(incoming, piece) or not inlet.ready():
                left.append(parcel)
                return
            if incoming.bitmap.touches(piece):
                raise FrameError("it overlaps verified blocks")
        except FrameError as err:
            self._taker.refused(parcel, err)
            return
        assert incoming.blocks is not None  # like the bitmap
        pages = self._kv.pages(piece.group, piece.layers, incoming.blocks.of(piece))
        key = incoming.peer_key.copy_key(parcel.header.sequence)
        self._flights.append(PendingCopy(parcel, piece, inlet.copy_in(pages, key)))

    def _is_written(self, incoming: IncomingHandoff, piece: Piece) -> bool:
        """A copy of the same attempt is writing some of it."""
        return any(f.parcel.attempt is incoming and f.piece.overlaps(piece) for f in self._flights)

    def _land(self, flight: PendingCopy, incoming: IncomingHandoff) -> None:
        if incoming.bitmap is None or not incoming.state.holds:
            self._taker.late(flight.parcel)
        elif flight.copy.intact:
            self._taker.took(flight.parcel, flight.piece)
        else:
            self._taker.damaged(flight.parcel)
