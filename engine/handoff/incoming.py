"""The state of one attempt at decode.

The engine thread owns it; threads of its connection call `write`, `arrives`, `frame_done`, `has`
and `num_written`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdserve.engine.api import Request, prefix_ids
from pdserve.engine.handoff.endpoint import HandoffAttempt
from pdserve.engine.handoff.open_blocks import BlocksReleased, OpenBlocks, WritableKv
from pdserve.engine.handoff.protocol import (
    Bitmap,
    FrameError,
    FrameHeader,
    Handoff,
    Piece,
    Ticket,
    TicketKeys,
)
from pdserve.engine.handoff.slow_peer import SlowPeerDetector
from pdserve.engine.kv import KvSpec


class ReceivingEngine(Protocol):
    """The part of Engine that a Receiver uses."""

    def reserve(self, request: Request, sender: bytes = b"") -> Any: ...
    def verified(self, reservation: Any, num_tokens: int) -> int: ...
    def commit(self, reservation: Any) -> None: ...
    def release(self, reservation: Any) -> None: ...
    def abort(self, key: str, choices: Sequence[int] = ()) -> bool: ...
    def park(self, key: str) -> bool: ...
    def stats(self) -> Any: ...


class ReservationLike(Protocol):
    num_tokens: int
    blocks: list[list[int]]
    first_block: list[int]
    cached_tokens: int


@dataclass(slots=True)
class ReceiveTimes:
    """Clock readings of one attempt; 0 means not reached."""

    admitted: float
    claimed: float = 0.0  # when prefill began, according to its Claim
    granted: float = 0.0
    computed: float = 0.0  # prefill's last chunk
    committed: float = 0.0


@dataclass(frozen=True, slots=True)
class Received:
    """The report of a committed hand-off."""

    attempt: bytes
    transport: str
    num_bytes: int
    cached_tokens: int  # not computed for it: the longer of decode's and prefill's prefix hits
    times: ReceiveTimes
    num_tokens: int  # tokens whose KV arrived
    inexact: bool = False  # another KV identity computed it


class IncomingHandoff(HandoffAttempt):
    """An attempt at decode."""

    def __init__(
        self,
        ticket: Ticket,
        state: Handoff,
        keys: TicketKeys,
        request: Request,
        promised: int,
        times: ReceiveTimes,
    ) -> None:
        super().__init__(ticket, state, keys.to_prefill, keys.to_decode)
        self.request = request
        self.num_tokens = len(prefix_ids(request)) - 1
        self.promised = promised  # blocks
        self.sender = b""  # digest of the KV identity that computes it; empty if it is local
        self.cancelled: set[int] = set()  # choices that were cancelled before the commit
        self.parked = False  # no client listens, so the request joins the engine parked
        self.reservation: ReservationLike | None = None
        self.bitmap: Bitmap | None = None  # what the engine thread knows to be written
        self.blocks: OpenBlocks | None = None
        self.num_verified = 0  # leading blocks that are verified in all layers
        self.slow_peer: SlowPeerDetector | None = None  # once granted
        self.arriving: set[int] = set()  # frames that have a slot here; only the reader thread adds
        self.acks: list[int] = []
        self.num_bytes = 0
        self.prefill_cached = 0
        self._idle_since = 0.0
        self.times = times

    def grant(
        self, reservation: ReservationLike, spec: KvSpec, now: float, ready: Any = None
    ) -> None:
        """Give the attempt its blocks, which may be written after `ready` (OpenBlocks)."""
        self.reservation = reservation
        bitmap_args = spec, reservation.num_tokens, reservation.first_block
        self.bitmap = Bitmap(*bitmap_args)
        self.blocks = OpenBlocks(reservation.blocks, Bitmap(*bitmap_args), ready)
        self.num_verified = self.bitmap.num_leading
        self.times.granted = self._idle_since = now
        self.slow_peer = SlowPeerDetector.begin(now)

    def arrives(self, header: FrameHeader) -> bool:
        """Register a genuine record on the reader thread; return False if the frame arrived
        before or contains nothing new."""
        if header.sequence in self.arriving or self.has(header):
            return False
        self.arriving.add(header.sequence)
        return True

    def frame_done(self, header: FrameHeader) -> None:
        """Record that a frame was written, damaged or too late; any thread may call it."""
        self.arriving.discard(header.sequence)

    def has(self, header: FrameHeader) -> bool:
        """Return whether all of the frame is verified and written; any thread may call it."""
        try:
            return self.bitmap is not None and self.bitmap.has(self.bitmap.piece(header))
        except FrameError:
            return False

    def newly_verified(self, block_size: int, now: float) -> int:
        """Update the count after frames were written. Return how many leading tokens all layers
        have now; 0 if that has not grown since the last call."""
        if self.bitmap is None or self.slow_peer is None:
            return 0
        blocks = self.bitmap.num_leading
        has_grown = blocks > self.num_verified
        self.slow_peer = self.slow_peer.arrived(now, chunk=has_grown)
        self.num_verified = blocks
        return min(self.num_tokens, blocks * block_size) if has_grown else 0

    def is_slow(self, now: float) -> bool:
        """Return whether the attempt's prefill has become slow. Call it several times a second."""
        if self.slow_peer is None:
            return False
        self.slow_peer = self.slow_peer.look(now, self.passed_over)
        return self.slow_peer.slow(now)

    def idle_block_s(self, now: float) -> float:
        """Return the block-seconds of blocks that were reserved but unwritten since the last call;
        a block whose layers are partly written counts in part."""
        if self.bitmap is None:
            return 0.0
        elapsed_s, self._idle_since = now - self._idle_since, now
        return elapsed_s * self.bitmap.missing_blocks

    @property
    def num_written(self) -> int:
        """Leading blocks that are verified and written; `num_verified` follows on the engine
        thread."""
        return self.blocks.num_leading if self.blocks is not None else 0

    def write(self, kv: WritableKv, header: FrameHeader, payload: memoryview) -> Piece | None:
        """Call OpenBlocks.write; also raises BlocksReleased if the attempt has no blocks yet."""
        if self.blocks is None:
            raise BlocksReleased
        return self.blocks.write(kv, header, payload)

    def settle(self) -> None:
        """Stop all writes: the blocks are about to leave the attempt."""
        if self.blocks is not None:
            self.blocks.close()
