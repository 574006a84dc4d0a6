"""Incoming hand-off attempts at decode: promises of blocks, the state and speed of one attempt, and
the queue of Claims.

The engine thread owns all of these; threads of an attempt's connection only call its `write`,
`arrives`, `frame_done`, `has` and `num_written`.

A promise allocates no blocks. It is made only if the promised blocks, this promise included, fit
into the free and evictable blocks minus the expected growth of running sequences, or if decode is
idle. It is released exactly once: when the blocks are reserved or when the attempt ends.

No attempt gets blocks before the attempt ahead of it in the queue has all of its blocks. The order
is FIFO, except that the attempts of one tenant are sorted by priority among the places that this
tenant holds.

A prefill worker that sends Progress but no KV is neither silent nor frozen: its machine may be
slow, or share its cores. Such an attempt ends as slow (SlowPeerDetector). Time in which prefill
computes other prompts first does not count; the worker reports it in Progress. That time is
limited: tenants take turns, and within a tenant a prompt waits for prompts of a lower priority
value, and the longer it waits, the sooner it passes those of an equal value. Blocks that have
arrived stay at decode as a cached prefix, so a retry with another prefill worker costs only the
missing chunks.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pdserve.engine.api import EngineError, Request, prefix_ids
from pdserve.engine.handoff.endpoint import HandoffAttempt
from pdserve.engine.handoff.open_blocks import BlocksReleased, OpenBlocks
from pdserve.engine.handoff.protocol import (
    Bitmap,
    FrameError,
    FrameHeader,
    Handoff,
    Piece,
    Ticket,
    TicketKeys,
)
from pdserve.engine.kv import KvSpec
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.scheduling import Reservation, by_priority

GROWTH_TOKENS = 64  # tokens that a running sequence is expected to need before it ends


def promise_blocks(num_tokens: int, num_choices: int, block_size: int) -> int:
    """Return how many blocks to promise for a prompt: those of all its tokens, plus one per choice.
    A hit in the prefix cache does not reduce them, since it may be evicted before the Claim."""
    return -(-num_tokens // block_size) + num_choices


class Promises:
    """Counts the blocks that decode has promised to hand-off attempts and not reserved yet; every
    operation is O(1)."""

    def __init__(self, block_size: int) -> None:
        self._growth = -(-GROWTH_TOKENS // block_size)
        self.blocks = 0

    def offer(self, blocks: int, available: int, running: int) -> bool:
        """Promise `blocks` if they fit beside the existing promises; return False if they do not.

        `available`: blocks of the pool that are free or can be evicted, including those of parked
        requests. `running`: sequences in the batch, each of which is expected to grow. A decode
        worker without promises and sequences accepts any number, since nothing else competes for
        its pool.
        """
        unpromised = available - self._growth * running - self.blocks
        if blocks > unpromised and (self.blocks or running):
            return False
        self.blocks += blocks
        return True

    def give_back(self, blocks: int) -> None:
        if blocks > self.blocks:
            raise ValueError(
                f"cannot give back {blocks} promised blocks: only {self.blocks} are promised"
            )
        self.blocks -= blocks


SLOW_RATIO = 2.0  # slow: more than this many times the longest chunk so far
SLOW_S = 2.0  # and longer than this
LOOK_S = 0.5  # a longer gap between two `look` calls means that decode was slow, and does not count


@dataclass(frozen=True, slots=True)
class SlowPeerDetector:
    """Detects that the KV of one prompt arrives too slowly, compared with the prompt's earlier
    chunks. All times are clock readings in seconds."""

    # Time that does not count is added to `chunk_at` and `moved`.
    chunk_at: float  # when the last chunk was complete; at first, when the blocks were granted
    moved: float  # when a frame last arrived
    looked: float  # when `look` was last called
    longest: float | None = None  # seconds of the longest chunk; None before the first

    @classmethod
    def begin(cls, now: float) -> "SlowPeerDetector":
        """Return the detector of an attempt whose blocks are granted at time `now`."""
        return cls(chunk_at=now, moved=now, looked=now)

    def arrived(self, now: float, chunk: bool) -> "SlowPeerDetector":
        """Record that verified frames arrived; `chunk`: they complete a chunk in all layers."""
        if not chunk:
            return replace(self, moved=now)
        longest = max(self.longest or 0.0, now - self.chunk_at)
        return replace(self, moved=now, chunk_at=now, longest=longest)

    def look(self, now: float, passed_over: bool = False) -> "SlowPeerDetector":
        """Exclude the time since the last call as far as it must not count. Call it several times a
        second, before `slow`.

        `passed_over`: prefill computes other prompts, so none of that time counts. Otherwise, time
        beyond LOOK_S does not count: then decode itself was slow.
        """
        discounted = now - self.looked - (0.0 if passed_over else LOOK_S)
        discounted = max(0.0, discounted)
        chunk_at, moved = min(now, self.chunk_at + discounted), min(now, self.moved + discounted)
        return replace(self, looked=now, chunk_at=chunk_at, moved=moved)

    def slow(self, now: float) -> bool:
        """Return whether no frame has arrived for more than SLOW_S seconds and more than SLOW_RATIO
        times the longest chunk so far. False before the first chunk is complete."""
        if self.longest is None:
            return False
        return now - self.moved > max(SLOW_S, SLOW_RATIO * self.longest)


class ReceivingEngine(Protocol):
    """The methods of the engine that a Receiver uses."""

    def reserve(self, request: Request, sender: bytes = b"") -> Any: ...
    def verified(self, reservation: Any, num_tokens: int) -> int: ...
    def commit(self, reservation: Any) -> None: ...
    def release(self, reservation: Any) -> None: ...
    def abort(self, key: str, choices: Sequence[int] = ()) -> bool: ...
    def park(self, key: str) -> bool: ...
    def stats(self) -> Any: ...


@dataclass(slots=True)
class ReceiveTimes:
    """When an incoming attempt reached each stage, as clock readings in seconds; 0 means not
    reached."""

    admitted: float
    claimed: float = 0.0  # when prefill began, according to its Claim
    granted: float = 0.0
    computed: float = 0.0  # prefill's last chunk
    committed: float = 0.0


@dataclass(frozen=True, slots=True)
class Received:
    """The Receiver's report of a completed hand-off: all of its KV has arrived at decode."""

    attempt: bytes
    transport: str
    num_bytes: int
    cached_tokens: int  # not computed for it: the longer of decode's and prefill's prefix hits
    times: ReceiveTimes
    num_tokens: int  # tokens whose KV arrived
    inexact: bool = False  # another KV identity computed it


class IncomingHandoff(HandoffAttempt):
    """The state of one hand-off attempt at decode, which receives the KV of a prompt."""

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
        self.reservation: Reservation | None = None
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

    def grant(self, reservation: Reservation, spec: KvSpec, now: float, ready: Any = None) -> None:
        """Give the attempt its reserved blocks. On a device they may be written after the event
        `ready` (OpenBlocks)."""
        self.reservation = reservation
        bitmap_args = spec, reservation.num_tokens, reservation.first_block
        self.bitmap = Bitmap(*bitmap_args)
        self.blocks = OpenBlocks(reservation.blocks, Bitmap(*bitmap_args), ready)
        self.num_verified = self.bitmap.num_leading
        self.times.granted = self._idle_since = now
        self.slow_peer = SlowPeerDetector.begin(now)

    def arrives(self, header: FrameHeader) -> bool:
        """Register a verified frame header on the reader thread; return False for a duplicate,
        whose payload is not needed."""
        if header.sequence in self.arriving or self.has(header):
            return False
        self.arriving.add(header.sequence)
        return True

    def frame_done(self, header: FrameHeader) -> None:
        """Forget a frame registered by `arrives`, which is now written, damaged or too late; any
        thread may call it."""
        self.arriving.discard(header.sequence)

    def has(self, header: FrameHeader) -> bool:
        """Return whether all blocks of the frame are written and verified already; any thread may
        call it."""
        try:
            return self.bitmap is not None and self.bitmap.has(self.bitmap.piece(header))
        except FrameError:
            return False

    def newly_verified(self, block_size: int, now: float) -> int:
        """Return the number of leading prompt tokens whose KV is verified in all layers; 0 if there
        are no more than at the last call. Call it after frames were written."""
        if self.bitmap is None or self.slow_peer is None:
            return 0
        blocks = self.bitmap.num_leading
        has_grown = blocks > self.num_verified
        self.slow_peer = self.slow_peer.arrived(now, chunk=has_grown)
        self.num_verified = blocks
        return min(self.num_tokens, blocks * block_size) if has_grown else 0

    def is_slow(self, now: float) -> bool:
        """Return whether the KV of this attempt arrives too slowly (SlowPeerDetector). Call it
        several times a second."""
        if self.slow_peer is None:
            return False
        self.slow_peer = self.slow_peer.look(now, self.passed_over)
        return self.slow_peer.slow(now)

    def idle_block_s(self, now: float) -> float:
        """Return for how many block-seconds since the last call blocks were reserved but not
        written; a block of which some layers are written counts in part."""
        if self.bitmap is None:
            return 0.0
        elapsed_s, self._idle_since = now - self._idle_since, now
        return elapsed_s * self.bitmap.missing_blocks

    @property
    def num_written(self) -> int:
        """Number of leading blocks that are verified and written; may be ahead of what the engine
        thread knows."""
        return self.blocks.num_leading if self.blocks is not None else 0

    def write(self, kv: KvCache, header: FrameHeader, payload: memoryview) -> Piece | None:
        """Write a frame by OpenBlocks.write; also raises BlocksReleased if the attempt has no
        blocks yet."""
        if self.blocks is None:
            raise BlocksReleased
        return self.blocks.write(kv, header, payload)

    def settle(self) -> None:
        """Stop all writes into the attempt's blocks, before the blocks are freed or go to the
        sequence."""
        if self.blocks is not None:
            self.blocks.close()


log = logging.getLogger(__name__)


class ClaimQueue:
    """The queue of attempts at decode that wait for blocks. Calls `refused(incoming, reason)` for
    an attempt whose blocks the engine can never reserve."""

    def __init__(
        self,
        engine: ReceivingEngine,
        kv: KvCache,
        clock: Callable[[], float],
        refused: Callable[[IncomingHandoff, str], None],
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._clock = clock
        self._refused = refused
        self._queue: deque[IncomingHandoff] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[IncomingHandoff]:
        return iter(self._queue)

    def add(self, incoming: IncomingHandoff) -> None:
        """Add an attempt that waits for blocks, sorted by priority within its tenant. An attempt
        that ends while it waits is dropped when its turn comes."""
        self._queue.append(incoming)
        ordered = by_priority(
            self._queue,
            lambda incoming: incoming.request.tenant,
            lambda incoming: incoming.request.priority,
        )
        self._queue = deque(ordered)

    def granted(self) -> Iterator[IncomingHandoff]:
        """Reserve blocks for the waiting attempts in order, as long as the pool has enough, and
        yield each attempt that got its blocks."""
        while self._queue:
            head = self._queue[0]
            if head.state.final:
                self._queue.popleft()
                continue
            try:
                reservation = self._engine.reserve(head.request, head.sender)
            except Exception as err:
                if not isinstance(err, EngineError):
                    log.exception("cannot reserve blocks for a hand-off, which therefore ends")
                self._queue.popleft()
                self._refused(head, f"reservation: {err}")
                continue
            if reservation is None:
                return
            try:
                ready = self._kv.ready()
            except Exception:
                self._engine.release(reservation)  # no other object knows this reservation
                raise
            self._queue.popleft()
            head.grant(reservation, self._kv.spec, self._clock(), ready)
            yield head
