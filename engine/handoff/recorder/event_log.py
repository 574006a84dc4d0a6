"""What a process notes of its hand-offs: records of 32 bytes, their codes, who writes them; pure.

    bytes   field
    0-7     time << 8 | kind   ns since its ring began; kind: a machine event, or a RecordKind
    8-15    attempt            the first 8 of its 16 random bytes
    16-19   sequence           of the record in its ring, from 1, modulo 2^32
    20-21   state              side << 12 | phase before << 6 | phase after
    22-23   detail             see RecordKind; of an event: TOLD, and the ring's word for the reason
    24-27   argument           see RecordKind; of an event: a bit for each action, in order
    28-31   check              CRC-32 of the 28 bytes before: a torn record is no record

Eight bytes name an attempt: among the 10^6 attempts that a few rings hold at most, two are alike
with probability 3e-8, and a record stays half a cache line. The codes of phases, events and actions
follow the machine's own order, so a ring carries VOCABULARY, a digest of their names: it is read
by the machine that wrote it, or refused.

Steps that change nothing (bytes heard, progress, ticks that find nothing) are left out; what the
checker (conform.py) needs of them is in the reason of the tick that found something.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, get_args
from zlib import crc32

from pdserve.engine.handoff.protocol.machine import Action, Actions, Event, Handoff, Phase, Side

RECORD_BYTES = 32
PREFIX_BYTES = 8  # of an attempt's id
TOLD = 1 << 15  # in the detail of Ended
MAX_DETAIL = (1 << 16) - 1
MAX_ARGUMENT = (1 << 32) - 1  # of a deadline: none


class RecordKind(IntEnum):
    """What is noted beside the machine's steps: (detail modulo 2^16, argument)."""

    OPENED = 128  # a side has the attempt (blocks promised, ms to its deadline); a router's route:
    #               (which try, number of the request); a follower's: (blocks awaited, the first
    #               four bytes of the attempt that they are of)
    TAKEN = 129  # blocks allocated (how many, cells to be filled; a cell: a block of a layer)
    FREED = 130  # blocks given back
    HANDED = 131  # blocks belong to the sequence now
    UNDONE = 132  # the commit has raised: the step before it is void
    SENT = 133  # a frame was read and signed (its sequence, cells)
    WRITTEN = 134  # a verified frame is in the blocks (its sequence, cells new)
    LATE = 135  # a frame of an ended attempt, dropped or not counted (its sequence, 0)
    GONE = 136  # a late Claim was answered Gone
    CLOSED = 137  # the router takes no more events of it, or its wait is over (word for why, 0)
    END = 138  # the process ended in order; of no attempt


EVENTS: tuple[type, ...] = get_args(Event)
# The machine does not run on these sides of an attempt:
ROUTE = "route"  # the router's
FOLLOW = "follow"  # decode's, while it waits for the KV of another
SIDES = (*(side.value for side in Side), ROUTE, FOLLOW)
PHASES = tuple(Phase)
ACTIONS = tuple(Action)
_NAMES = (
    *(event.__name__ for event in EVENTS),
    *SIDES,
    *(phase.value for phase in PHASES),
    *(action.value for action in ACTIONS),
    *(mark.name for mark in RecordKind),
)
VOCABULARY = crc32(" ".join(_NAMES).encode())

# Enum members hash in Python; their ids do not.
_KIND = {event: number for number, event in enumerate(EVENTS)}
_SIDE = {id(side): number << 12 for number, side in enumerate(Side)}
_PHASE = {id(phase): number for number, phase in enumerate(PHASES)}
_BIT = {id(action): 1 << number for number, action in enumerate(ACTIONS)}
_ROUTE = SIDES.index(ROUTE) << 12
_FOLLOW = SIDES.index(FOLLOW) << 12
_MARKS = frozenset(int(mark) for mark in RecordKind)
_BODY = struct.Struct("<Q8sIHHI")
_CHECK = struct.Struct("<I")


class Record(NamedTuple):
    """One record, unpacked; `time_ns` counts from its ring's epoch."""

    time_ns: int
    kind: int
    attempt: bytes
    sequence: int
    state: int
    detail: int
    argument: int

    @property
    def event(self) -> type | None:
        """The machine's event; None: a RecordKind."""
        return EVENTS[self.kind] if self.kind < len(EVENTS) else None

    @property
    def mark(self) -> RecordKind | None:
        return RecordKind(self.kind) if self.kind >= RecordKind.OPENED else None

    @property
    def side(self) -> str:
        return SIDES[self.state >> 12]

    @property
    def before(self) -> Phase:
        return PHASES[self.state >> 6 & 63]

    @property
    def after(self) -> Phase:
        return PHASES[self.state & 63]

    @property
    def actions(self) -> Actions:
        """Of an event, in Action's order."""
        return tuple(a for n, a in enumerate(ACTIONS) if self.argument >> n & 1)


def pack(
    time_ns: int,
    kind: int,
    attempt: bytes,
    sequence: int,
    state: int,
    detail: int,
    argument: int,
) -> bytes:
    """The RECORD_BYTES bytes of a Record with these fields; of `attempt` the first eight count."""
    word = time_ns << 8 | kind
    body = _BODY.pack(word, attempt, sequence & 0xFFFFFFFF, state, detail, argument)
    return body + _CHECK.pack(crc32(body))


def unpack(data: bytes) -> Record | None:
    """The inverse of `pack`; None: torn, damaged, never written."""
    body = data[: _BODY.size]
    if len(data) != RECORD_BYTES or crc32(body) != _CHECK.unpack_from(data, _BODY.size)[0]:
        return None
    word, attempt, sequence, state, detail, argument = _BODY.unpack(body)
    kind = word & 255
    phases = max(state >> 6 & 63, state & 63)
    if not (kind < len(EVENTS) or kind in _MARKS):
        return None
    if state >> 12 >= len(SIDES) or phases >= len(PHASES):
        return None
    return Record(word >> 8, kind, attempt, sequence, state, detail, argument)


def action_bits(actions: Actions) -> int:
    """The argument of an event's record."""
    bits = 0
    for action in actions:
        bits |= _BIT[id(action)]
    return bits


@dataclass(frozen=True, slots=True)
class Recording:
    """What one process has noted, as far as its ring still has it."""

    role: str
    boot: bytes  # this life of the process
    host: bytes  # the running kernel: one monotonic clock
    epoch_ns: int  # CLOCK_MONOTONIC at time 0
    wall_ns: int  # time of day at time 0
    words: tuple[str, ...]
    records: list[Record]
    lost: int = 0  # older records, overwritten
    damaged: int = 0  # records that should be there and are not whole

    @property
    def name(self) -> str:
        return f"{self.role}-{self.boot.hex()[:6]}"

    def word(self, detail: int) -> str:
        number = detail & ~TOLD
        return self.words[number] if number < len(self.words) else "?"


class RecordSink(Protocol):
    """Where records go; any thread."""

    def append(self, kind: int, attempt: bytes, state: int, detail: int, argument: int) -> None:
        """Add a record under the next sequence number and the time now."""

    def word(self, text: str) -> int:
        """The number of a text in the log, below TOLD."""


class EventLog:
    """Notes steps and marks in a log; without one it does nothing."""

    def __init__(self, log: RecordSink | None = None) -> None:
        self._log = log

    def step(
        self, attempt: bytes, event: Event, before: Handoff, after: Handoff, actions: Actions
    ) -> None:
        """A step of the machine, before its actions are done."""
        log = self._log
        if log is None or not (actions or before.phase is not after.phase):
            return
        changed = before.phase is not after.phase
        reason = getattr(event, "reason", "") or (after.reason if changed else "")
        detail = log.word(reason) if reason else 0
        if getattr(event, "told", False):
            detail |= TOLD
        phases = _PHASE[id(before.phase)] << 6 | _PHASE[id(after.phase)]
        state = _SIDE[id(before.side)] | phases
        log.append(_KIND[type(event)], attempt, state, detail, action_bits(actions))

    def mark(
        self, mark: RecordKind, attempt: bytes, state: Handoff, detail: int = 0, argument: int = 0
    ) -> None:
        """Something beside the machine, on the attempt's side, in its present phase."""
        if self._log is not None:
            phase = _PHASE[id(state.phase)] * 65  # before and after are the same
            code = _SIDE[id(state.side)] | phase
            bounded = argument if argument < MAX_ARGUMENT else MAX_ARGUMENT
            self._log.append(mark, attempt, code, detail & MAX_DETAIL, bounded)

    def route(self, attempt: bytes, number: int, request: int) -> None:
        """The router begins the try `number` of its request number `request`."""
        if self._log is not None:
            tries, which = number & MAX_DETAIL, request & MAX_ARGUMENT
            self._log.append(RecordKind.OPENED, attempt, _ROUTE, tries, which)

    def unroute(self, attempt: bytes, reason: str) -> None:
        """The router is done with it; `reason`: why it is lost, empty otherwise."""
        if self._log is not None:
            self._log.append(RecordKind.CLOSED, attempt, _ROUTE, self._log.word(reason), 0)

    def follow(self, attempt: bytes, blocks: int, leader: bytes) -> None:
        """Decode has it wait for that many blocks of another."""
        if self._log is not None:
            other = int.from_bytes(leader[:4], "big")
            self._log.append(RecordKind.OPENED, attempt, _FOLLOW, blocks & MAX_DETAIL, other)

    def unfollow(self, attempt: bytes, reason: str) -> None:
        """That wait is over."""
        if self._log is not None:
            self._log.append(RecordKind.CLOSED, attempt, _FOLLOW, self._log.word(reason), 0)
