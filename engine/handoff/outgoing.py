"""One outgoing hand-off attempt at prefill, and how its frames are read from the pool and signed.

The writer thread of the connection builds a frame and passes it to the wire under the attempt's
lock. Freeing the blocks takes the same lock first, so no frame is ever read from blocks that have a
new owner. On a device a frame's copy may still run at that point, and `settle` waits for it.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from pdserve.engine.handoff.endpoint import HandoffAttempt
from pdserve.engine.handoff.protocol import (
    TAG_BYTES,
    Domain,
    FrameHeader,
    Handoff,
    Piece,
    Ticket,
    TicketKeys,
    mark_of,
)
from pdserve.engine.handoff.recorder import EventLog, RecordKind
from pdserve.engine.kv import Pages
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.transport import Copy, DeviceError, DeviceSink, Frame

log = logging.getLogger(__name__)


HANDED_BACK = "handed back"  # reason of an attempt that ended before the engine began it


@dataclass(slots=True)
class SendTimes:
    """When an outgoing attempt reached each stage, as clock readings in seconds; 0 means not
    reached."""

    started: float
    picked: float = 0.0
    computed: float = 0.0
    completed: float = 0.0  # decode's Complete arrived
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Sent:
    """The Sender's report of an ended attempt; `reason` says why it failed, and is empty if decode
    has all blocks."""

    attempt: bytes
    reason: str
    cached_tokens: int
    num_bytes: int
    transport: str
    times: SendTimes


class Pushed(NamedTuple):
    """A frame that prefill has sent and decode has neither acknowledged nor refused."""

    piece: Piece
    resends: int  # number of resends so far
    slot: int
    mark: bytes


class OutgoingHandoff(HandoffAttempt):
    """The state of one hand-off attempt at prefill, which sends the KV of a prompt."""

    def __init__(
        self,
        ticket: Ticket,
        state: Handoff,
        keys: TicketKeys,
        address: str,
        num_tokens: int,
        times: SendTimes,
        event_log: EventLog,
        encrypted: bool = False,
        held_key: str = "",
    ) -> None:
        super().__init__(ticket, state, keys.to_decode, keys.to_prefill)
        self.key = held_key or ticket.attempt.hex()  # key of the engine's request
        self.migrates = bool(held_key)  # a held request keeps the blocks until decode has the KV
        self.address = address
        self.num_tokens = num_tokens
        self.num_computed = 0
        self.done = False  # everything is computed, and the engine only holds the blocks
        self.cached_tokens = 0
        self.lock = threading.Lock()  # held while a frame reads blocks
        self.readable = True  # until the blocks are freed; under the lock
        self.copies: deque[Copy] = deque()  # copies on the device, newest last; under the lock
        self.next_blocks: list[int] = []  # per group, once granted
        self.pending: dict[int, Pushed] = {}  # by sequence
        self.num_bytes = 0  # sent, including resends
        self.num_frames = 0
        self.times = times
        self.encrypted = encrypted  # payloads are sealed, not only tagged
        self.event_log = event_log

    def push(self, kv: KvCache, pieces: Iterable[Piece], table: list[int], resends: int) -> None:
        """Queue one frame for each piece; the writer thread reads and signs a frame when a slot is
        free. `table`: the pool block of every logical block. `resends`: how often the pieces were
        resent."""
        if self.link is None:
            return
        jobs = []
        direct = self.link.direct
        ready = kv.ready() if direct else None
        for piece in pieces:
            blocks = tuple(table[piece.blocks.start : piece.blocks.stop])
            assert len(blocks) == len(piece.blocks), (
                "the engine does not hold all blocks of the piece"
            )
            pages = kv.pages(piece.group, piece.layers, blocks, ready) if direct else None
            jobs.append(partial(self._build, kv, piece, blocks, resends, pages))
        self.link.push(*jobs)

    def settle(self) -> None:
        """Stop all reads of the attempt's blocks and wait for running copies, before the blocks are
        freed; called on the engine thread."""
        with self.lock:
            self.readable = False
            copies, self.copies = self.copies, deque()
        for copy in copies:
            try:
                copy.wait()  # bounded by the copy's duration, whatever the peer does
            except DeviceError:
                log.exception("a device copy of the blocks of a hand-off failed")

    @contextmanager
    def _build(
        self,
        kv: KvCache,
        piece: Piece,
        blocks: tuple[int, ...],
        resends: int,
        pages: Pages | None,
        slot: int,
        sink: DeviceSink | None,
    ) -> Iterator[Frame | None]:
        """Yield the signed frame of a piece, whose bytes stay valid while the context lasts; None
        if the blocks are already freed."""
        spec = kv.spec
        group = spec.groups[piece.group]
        size = len(piece.layers) * len(blocks) * group.block_bytes(spec.block_size)
        sequence = next(self.sequence)
        with self.lock:
            if not self.readable:
                yield None
                return
            parts, tag = self._payload(kv, piece, blocks, pages, sink, sequence)
            cells = len(piece.layers) * len(blocks)
            self.event_log.record(RecordKind.SENT, self.ticket.attempt, self.state, sequence, cells)
            header = FrameHeader(
                ticket=self.ticket.id,
                sequence=sequence,
                slot=slot,
                group=piece.group,
                layers=piece.layers,
                tokens=_tokens(piece.blocks, spec.block_size),
                heads=range(group.head_start, group.head_end),
                payload_bytes=size,
                payload_tag=tag,
            )
            self.num_bytes += size
            self.num_frames += 1
            covered = header.pack()
            record = covered + self.own_key.tag(Domain.HEADER, sequence, covered)
            self.pending[sequence] = Pushed(piece, resends, slot, mark_of(record))
            yield Frame(record, parts)

    def answered(self, sequence: int) -> Pushed | None:
        """Remove a frame that decode has acknowledged or refused, and return it; None if it was not
        pending."""
        pushed = self.pending.pop(sequence, None)
        if pushed is not None and self.link is not None:
            self.link.slot_returned(pushed.slot, pushed.mark)
        return pushed

    def answered_all(self) -> None:
        """Remove all frames that wait for an answer: decode's Complete has acknowledged them."""
        for sequence in list(self.pending):
            self.answered(sequence)

    def _payload(
        self,
        kv: KvCache,
        piece: Piece,
        blocks: tuple[int, ...],
        pages: Pages | None,
        sink: DeviceSink | None,
        sequence: int,
    ) -> tuple[list[memoryview], bytes]:
        """Return (the parts of a frame's payload, their tag). On a device, begin the copy that
        writes payload and tag into the slot, and return (no parts, a tag of zeros)."""
        if sink is not None:
            assert pages is not None
            assert not self.encrypted, "decode refuses encrypted payloads on a device"
            self.copies.append(sink.copy_out(pages, self.own_key.copy_key(sequence)))
            while self.copies[0].done() and len(self.copies) > 1:
                self.copies.popleft()
            return [], bytes(TAG_BYTES)
        parts = kv.read(piece.group, piece.layers, blocks)
        if not self.encrypted:
            return parts, self.own_key.tag(Domain.PAYLOAD, sequence, *parts)
        sealed = self.own_key.seal(sequence, b"".join(parts))
        return [sealed[:-TAG_BYTES]], bytes(sealed[-TAG_BYTES:])


def _tokens(blocks: range, block_size: int) -> range:
    return range(blocks.start * block_size, blocks.stop * block_size)
