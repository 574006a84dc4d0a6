"""The event log of hand-offs: its records of 32 bytes, its writer, and timelines of several logs;
pure.

    bytes   field
    0-7     time << 8 | code   ns since the ring began; the code of a machine event or a RecordKind
    8-15    attempt            the first 8 of its 16 random bytes
    16-19   sequence           of the record in its ring, from 1, modulo 2^32
    20-21   state              side << 12 | phase before << 6 | phase after
    22-23   detail             see RecordKind; of an event: PEER_NOTIFIED | number of the reason
    24-27   argument           see RecordKind; of an event: one bit for each action, in order
    28-31   check              CRC-32 of the 28 bytes before; a torn record is ignored

Eight bytes are enough to name an attempt: a few rings hold at most 10^6 attempts, and two of them
collide with probability 3e-8. So a record takes half a cache line. The codes of phases, events and
actions follow the machine's order. A ring therefore carries VOCABULARY, a digest of their names,
and a reader with another vocabulary refuses it.

Steps that change nothing (bytes heard, progress, ticks that find nothing) are not recorded. The
checker (conform.py) derives what it needs from the reason of the tick that ended the attempt.

Processes on one host share a monotonic clock, so their records merge in the order in which they
were made. Records of several hosts merge by the time of day, so the order between hosts is not
reliable.
"""

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, get_args
from zlib import crc32

from pdserve.engine.handoff.protocol import Action, Actions, Event, Handoff, Phase, Side

RECORD_BYTES = 32
PREFIX_BYTES = 8  # of an attempt's id
PEER_NOTIFIED = 1 << 15  # in the detail of HandoffEnded
MAX_DETAIL = (1 << 16) - 1
MAX_ARGUMENT = (1 << 32) - 1  # of a deadline: none


class RecordKind(IntEnum):
    """Kinds of records that are no step of the state machine. The comment of each kind says, in
    parentheses, what its detail (modulo 2^16) and its argument hold."""

    OPENED = 128  # a side has the attempt (blocks promised, ms to its deadline); a router's route
    #               has (which try, number of the request); a follower's wait has (blocks awaited,
    #               the first four bytes of the attempt that computes them)
    TAKEN = 129  # blocks were allocated (number, cells to fill; a cell is one layer of a block)
    FREED = 130  # the blocks were freed
    HANDED = 131  # the blocks belong to the sequence now
    UNDONE = 132  # the commit raised, so the step before it is void
    SENT = 133  # a frame was read and signed (its sequence, its cells)
    WRITTEN = 134  # a verified frame is in the blocks (its sequence, its new cells)
    LATE = 135  # a frame of an ended attempt was dropped or not counted (its sequence, 0)
    GONE = 136  # a late Claim was answered Gone
    CLOSED = 137  # the router or the follower has finished (number of the reason, 0)
    END = 138  # the process ended in order; belongs to no attempt


EVENTS: tuple[type, ...] = get_args(Event)
# The machine does not run on these two sides of an attempt:
ROUTE = "route"  # at the router
FOLLOW = "follow"  # at decode, while it waits for KV that another attempt computes
SIDES = (*(side.value for side in Side), ROUTE, FOLLOW)
PHASES = tuple(Phase)
ACTIONS = tuple(Action)
_NAMES = (
    *(event.__name__ for event in EVENTS),
    *SIDES,
    *(phase.value for phase in PHASES),
    *(action.value for action in ACTIONS),
    *(kind.name for kind in RecordKind),
)
VOCABULARY = crc32(" ".join(_NAMES).encode())

# Enum members hash in Python code; their ids hash in C.
_CODE = {event: number for number, event in enumerate(EVENTS)}
_SIDE = {id(side): number << 12 for number, side in enumerate(Side)}
_PHASE = {id(phase): number for number, phase in enumerate(PHASES)}
_BIT = {id(action): 1 << number for number, action in enumerate(ACTIONS)}
_ROUTE = SIDES.index(ROUTE) << 12
_FOLLOW = SIDES.index(FOLLOW) << 12
_KINDS = frozenset(int(kind) for kind in RecordKind)
_BODY = struct.Struct("<Q8sIHHI")
_CHECK = struct.Struct("<I")


class Record(NamedTuple):
    """One decoded record of the event log; `time_ns` counts from the epoch of its ring file."""

    time_ns: int
    code: int
    attempt: bytes
    sequence: int
    state: int
    detail: int
    argument: int

    @property
    def event(self) -> type | None:
        """The class of the state machine's event; None if the record is no step of the machine."""
        return EVENTS[self.code] if self.code < len(EVENTS) else None

    @property
    def kind(self) -> RecordKind | None:
        """The RecordKind; None if the record is a step of the state machine."""
        return RecordKind(self.code) if self.code >= RecordKind.OPENED else None

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
        """The actions of the recorded step of the state machine, in the order of Action."""
        return tuple(a for n, a in enumerate(ACTIONS) if self.argument >> n & 1)


def pack(
    time_ns: int,
    code: int,
    attempt: bytes,
    sequence: int,
    state: int,
    detail: int,
    argument: int,
) -> bytes:
    """Encode a record in RECORD_BYTES bytes, with its checksum; only eight bytes of `attempt` are
    kept."""
    time_and_code = time_ns << 8 | code
    body = _BODY.pack(time_and_code, attempt, sequence & 0xFFFFFFFF, state, detail, argument)
    return body + _CHECK.pack(crc32(body))


def unpack(data: bytes) -> Record | None:
    """Decode a record; return None if it is torn, damaged or was never written."""
    body = data[: _BODY.size]
    if len(data) != RECORD_BYTES or crc32(body) != _CHECK.unpack_from(data, _BODY.size)[0]:
        return None
    time_and_code, attempt, sequence, state, detail, argument = _BODY.unpack(body)
    code = time_and_code & 255
    phases = max(state >> 6 & 63, state & 63)
    if not (code < len(EVENTS) or code in _KINDS):
        return None
    if state >> 12 >= len(SIDES) or phases >= len(PHASES):
        return None
    return Record(time_and_code >> 8, code, attempt, sequence, state, detail, argument)


def action_bits(actions: Actions) -> int:
    """Return the actions of a step as the argument of its record: one bit per action, in Action's
    order."""
    bits = 0
    for action in actions:
        bits |= _BIT[id(action)]
    return bits


@dataclass(frozen=True, slots=True)
class Recording:
    """The event log of one process, as read from its ring file: the newest records, and how many
    are lost."""

    role: str
    incarnation: bytes  # of the process
    host: bytes  # id of the running kernel, whose processes share one monotonic clock
    epoch_ns: int  # CLOCK_MONOTONIC at time 0
    wall_ns: int  # time of day at time 0
    reasons: tuple[str, ...]
    records: list[Record]
    lost: int = 0  # number of older records that were overwritten
    damaged: int = 0  # number of records that should be present and whole but are not

    @property
    def name(self) -> str:
        return f"{self.role}-{self.incarnation.hex()[:6]}"

    def reason(self, detail: int) -> str:
        """Return the text of the reason whose number is in a record's detail."""
        number = detail & ~PEER_NOTIFIED
        return self.reasons[number] if number < len(self.reasons) else "?"


class RecordSink(Protocol):
    """Where an EventLog stores its records, such as a ring file; any thread may call it."""

    def append(self, code: int, attempt: bytes, state: int, detail: int, argument: int) -> None:
        """Add a record with the next sequence number and the current time."""

    def reason_number(self, text: str) -> int:
        """Return the number by which records of this sink name the reason `text`; it is below
        PEER_NOTIFIED."""


class EventLog:
    """Writes the hand-off records of one process to a sink; without a sink it does nothing."""

    def __init__(self, sink: RecordSink | None = None) -> None:
        self._sink = sink

    def step(
        self, attempt: bytes, event: Event, before: Handoff, after: Handoff, actions: Actions
    ) -> None:
        """Record a step of an attempt's state machine; call it before the step's actions are
        carried out."""
        sink = self._sink
        if sink is None or not (actions or before.phase is not after.phase):
            return
        changed = before.phase is not after.phase
        reason = getattr(event, "reason", "") or (after.reason if changed else "")
        detail = sink.reason_number(reason) if reason else 0
        if getattr(event, "peer_notified", False):
            detail |= PEER_NOTIFIED
        phases = _PHASE[id(before.phase)] << 6 | _PHASE[id(after.phase)]
        state = _SIDE[id(before.side)] | phases
        sink.append(_CODE[type(event)], attempt, state, detail, action_bits(actions))

    def record(
        self, kind: RecordKind, attempt: bytes, state: Handoff, detail: int = 0, argument: int = 0
    ) -> None:
        """Record an event of an attempt that is no step of the state machine, in the attempt's
        present phase."""
        if self._sink is not None:
            phase = _PHASE[id(state.phase)] * 65  # before and after are the same
            side_and_phase = _SIDE[id(state.side)] | phase
            bounded = argument if argument < MAX_ARGUMENT else MAX_ARGUMENT
            self._sink.append(kind, attempt, side_and_phase, detail & MAX_DETAIL, bounded)

    def route(self, attempt: bytes, number: int, request: int) -> None:
        """Record that the router begins an attempt: try `number` of its request number
        `request`."""
        if self._sink is not None:
            try_number, request_number = number & MAX_DETAIL, request & MAX_ARGUMENT
            self._sink.append(RecordKind.OPENED, attempt, _ROUTE, try_number, request_number)

    def unroute(self, attempt: bytes, reason: str) -> None:
        """Record that the router is done with an attempt. `reason`: why the attempt failed; empty
        if it did not."""
        self._close(attempt, _ROUTE, reason)

    def follow(self, attempt: bytes, blocks: int, leader: bytes) -> None:
        """Record that decode makes an attempt wait for `blocks` blocks that the attempt `leader`
        computes."""
        if self._sink is not None:
            leader_prefix = int.from_bytes(leader[:4], "big")
            self._sink.append(
                RecordKind.OPENED, attempt, _FOLLOW, blocks & MAX_DETAIL, leader_prefix
            )

    def unfollow(self, attempt: bytes, reason: str) -> None:
        """Record that an attempt no longer waits for another attempt's blocks, and the reason."""
        self._close(attempt, _FOLLOW, reason)

    def _close(self, attempt: bytes, side: int, reason: str) -> None:
        if self._sink is not None:
            number = self._sink.reason_number(reason)
            self._sink.append(RecordKind.CLOSED, attempt, side, number, 0)


class Entry(NamedTuple):
    """A record with its time on the common clock and the recording that it comes from."""

    at_ns: int
    source: int  # index of its recording
    record: Record


@dataclass(frozen=True, slots=True)
class Timeline:
    """The records of several processes in one order of time."""

    recordings: tuple[Recording, ...]
    entries: tuple[Entry, ...]
    one_host: bool  # all recordings share one clock

    def of(self, entry: Entry) -> Recording:
        return self.recordings[entry.source]

    def attempts(self) -> dict[bytes, list[Entry]]:
        """Return the entries of each attempt, by the first eight bytes of its id, oldest attempt
        first."""
        by_attempt: dict[bytes, list[Entry]] = {}
        for entry in self.entries:
            if entry.record.code != RecordKind.END:
                by_attempt.setdefault(entry.record.attempt, []).append(entry)
        return by_attempt


def merge(recordings: Iterable[Recording]) -> Timeline:
    """Merge the recordings of several processes, each already in order, into one timeline."""
    all_recordings = tuple(recordings)
    one_host = len({recording.host for recording in all_recordings}) < 2
    entries = [
        Entry((r.epoch_ns if one_host else r.wall_ns) + record.time_ns, source, record)
        for source, r in enumerate(all_recordings)
        for record in r.records
    ]
    entries.sort(key=lambda entry: entry.at_ns)  # stable: each recording keeps its order
    return Timeline(all_recordings, tuple(entries), one_host)


def describe(recording: Recording, record: Record) -> str:
    """Describe a record in one line of text, without its time and attempt."""
    detail, argument = record.detail, record.argument
    match record.kind:
        case None:
            return _step(recording, record)
        case RecordKind.OPENED if record.side == ROUTE:
            return f"opened: try {detail} of request {argument}"
        case RecordKind.OPENED if record.side == FOLLOW:
            return f"waits for {detail} blocks of attempt {argument:08x}"
        case RecordKind.OPENED:
            deadline = (
                "no deadline" if argument == MAX_ARGUMENT else f"deadline in {argument / 1000:g} s"
            )
            promised = f", {detail} blocks promised" if detail else ""
            return f"opened: {deadline}{promised}"
        case RecordKind.TAKEN:
            return f"took {detail} blocks" + (f", {argument} cells to fill" if argument else "")
        case RecordKind.FREED:
            return "freed the blocks"
        case RecordKind.HANDED:
            return "handed the blocks to the sequence"
        case RecordKind.UNDONE:
            return f"the commit failed; the phase is {record.after.value} again"
        case RecordKind.SENT:
            return f"frame {detail} sent: {argument} cells"
        case RecordKind.WRITTEN:
            return f"frame {detail} written: {argument} new cells"
        case RecordKind.LATE:
            return f"frame {detail} dropped: late"
        case RecordKind.GONE:
            return "answered the Claim with Gone"
        case RecordKind.CLOSED:
            reason = recording.reason(detail)
            return f"closed: {reason}" if reason else "closed"
        case _:
            return "the process ended in order"


def _step(recording: Recording, record: Record) -> str:
    reason = recording.reason(record.detail)
    event = event_name(record)
    notified = ", peer notified" if record.detail & PEER_NOTIFIED else ""
    reason_text = f" ({reason}{notified})" if reason else ""
    moved = record.before is not record.after
    phases = f"{record.before.value} -> {record.after.value}" if moved else record.before.value
    return f"{event}{reason_text}: {phases}; {', '.join(a.value for a in record.actions)}"


def event_name(record: Record) -> str:
    """Return the machine event ("claim granted") or record kind ("opened") in lower case."""
    if record.event is None:
        return RecordKind(record.code).name.lower()
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", record.event.__name__).lower()
