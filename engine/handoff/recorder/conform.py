"""Checks the event logs of processes against the state machine that they run, by replaying each
side of every hand-off attempt; pure.

An attempt whose older records are overwritten or damaged is only checked step by step. The phases
and actions of every record must be those of machine.step. In addition:

- blocks are taken once, and freed or handed to the sequence once, when the machine says so;
  no frame is sent or written while the side has no blocks; an orderly end leaves nothing alive
- receive commits only when the new cells of its frames sum up to what it requested
- what one side learns from the other was recorded there first: Picked before Claimed, Reserved
  before Granted, receive's Filled before send's; a frame was sent before it is written, with no
  fewer cells; one process sends an attempt and one receives it
- a router opens an attempt before decode has it, and closes it once
- a follower (an attempt that waits for the KV of another one, services/decode/single_flight) is
  handed no KV, its wait ends once, and no follower waits at an orderly end

Records that were overwritten, or never written because a process died, are no violation: rules that
need them are not applied to their attempt.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from pdserve.engine.handoff.protocol import (
    Action,
    Actions,
    Event,
    Handoff,
    HandoffEnded,
    Phase,
    Side,
    Tick,
    machine,
)
from pdserve.engine.handoff.recorder.event_log import (
    FOLLOW,
    MAX_ARGUMENT,
    PEER_NOTIFIED,
    ROUTE,
    Entry,
    Record,
    Recording,
    RecordKind,
    Timeline,
    action_bits,
    describe,
    event_name,
    merge,
)

INF = float("inf")
SLACK_S = 0.1  # maximum time between reading a clock and writing the record
OWED_RECORDS = {Action.FREE_BLOCKS: RecordKind.FREED, Action.COMMIT: RecordKind.HANDED}
AROUND = 4  # records of the attempt shown before and after a violation
SEND, RECEIVE = Side.SEND.value, Side.RECEIVE.value
# In each pair, the first is recorded before the second.
ORDER = (
    ((SEND, "picked"), (RECEIVE, "claimed")),
    ((RECEIVE, "reserved"), (SEND, "claim granted")),
    ((RECEIVE, "filled"), (SEND, "filled")),
    ((RECEIVE, "opened"), (SEND, "opened")),
    ((ROUTE, "opened"), (RECEIVE, "opened")),
    ((ROUTE, "opened"), (FOLLOW, "opened")),
)
# Besides the machine's events, only the engine thread records these.
BY_ENGINE = (RecordKind.OPENED, RecordKind.TAKEN, RecordKind.END)
NOT_OPENED = "no record opens the attempt"
BrokenRule = tuple[Entry, str]
Sides = dict[str, dict[int, list[Entry]]]  # by side and recording


class Replay:
    """Replays the records of one attempt on one side, in order, from its `first` entry, and checks
    them against the state machine.

    `has_all_records`: the recording has every record of the attempt. `begins`: the attempt's
    records may begin with `first`, since it opens the attempt or the recording has lost records.
    """

    def __init__(self, recording: Recording, first: Entry) -> None:
        record = first.record
        self._recording = recording
        self.has_all_records = record.kind is RecordKind.OPENED and not recording.damaged
        self.begins = self.has_all_records or bool(recording.lost or recording.damaged)
        self.state = Handoff(Side(record.side), INF, record.before)
        self._last = first
        self._before = self.state  # the state before the last step; UNDONE returns to it
        self._opened: Entry | None = None
        self._linked_ns = first.at_ns
        self._has_blocks = False
        self._owed: tuple[RecordKind, Entry] | None = None
        self._expected_cells = 0  # cells
        self._cells = 0

    def take(self, entry: Entry) -> Iterator[str]:
        """Process the next record of the attempt and yield each rule that it breaks."""
        self._last = entry
        record = entry.record
        if record.event is not None:
            yield from self._step(entry)
        elif self.has_all_records:
            yield from self._check_kind(entry)

    def end(self, engine_sequence: int, orderly: bool) -> Iterator[tuple[Entry, str]]:
        """Yield each rule that is broken when the recording ends: missing records, an attempt that
        is not over.

        `engine_sequence`: sequence of the last record that the engine thread made. `orderly`: the
        process recorded its own end, so it did not crash.
        """
        if not self.has_all_records:
            return
        if self._owed is not None and self._owed[1].record.sequence < engine_sequence:
            yield self._owed[1], f"the record {self._owed[0].name} is missing"
        if orderly and not self.state.final:
            yield self._last, "the attempt had not ended when the process ended in order"
        if orderly and self._has_blocks:
            yield self._last, "the attempt had blocks when the process ended in order"

    def _step(self, entry: Entry) -> Iterator[str]:
        record = entry.record
        if record.before is not self.state.phase:
            if self.has_all_records:
                yield (
                    f"the phase was {self.state.phase.value}, but the record says "
                    f"{record.before.value}"
                )
            self.state = replace(self.state, phase=record.before)
        state, event = self._input(record, entry.at_ns / 1e9)
        after, actions = machine.step(state, event, entry.at_ns / 1e9)
        if after.phase is not record.after:
            yield f"the machine's next phase is {after.phase.value}"
        if action_bits(actions) != record.argument:
            yield f"the machine's actions are: {', '.join(action.value for action in actions)}"
        if isinstance(event, HandoffEnded | Tick) and after.phase is Phase.RELEASED:
            yield from self._too_early(record, entry.at_ns)
        if after.phase is Phase.CLAIMED and record.before is not Phase.CLAIMED:
            self._linked_ns = entry.at_ns
        self._before, self.state = self.state, replace(after, phase=record.after)
        if self.has_all_records:
            yield from self._record_owed(actions, entry)

    def _input(self, record: Record, now: float) -> tuple[Handoff, Event]:
        """Return the state and the event that the process passed to `machine.step`, as far as the
        result depends on them."""
        reason = self._recording.reason(record.detail)
        state = replace(self.state, deadline=INF, heard=now, moved=now)
        if record.event is Tick:
            if reason == "deadline":
                return replace(state, deadline=now), Tick()
            if reason == "peer silent":
                return replace(state, heard=-INF), Tick()
            if reason == "peer frozen":
                return replace(state, moved=-INF), Tick()
            return state, HandoffEnded(reason)
        assert record.event is not None
        peer_notified = bool(record.detail & PEER_NOTIFIED)
        # The machine's step depends on none of the other fields.
        values = {"at": now, "reason": reason, "peer_notified": peer_notified}
        event: Event = record.event(**{f.name: values.get(f.name, 0) for f in fields(record.event)})
        return state, event

    def _too_early(self, record: Record, at_ns: int) -> Iterator[str]:
        """Yield a broken rule if a tick ended the attempt for a silent peer, a frozen peer or the
        deadline before this could have been the case."""
        reason = self._recording.reason(record.detail)
        linked_s = (at_ns - self._linked_ns) / 1e9 + SLACK_S
        if record.event is not Tick or not self.has_all_records:
            return
        if reason == "peer silent" and linked_s < machine.SILENCE_S:
            yield "the peer cannot have been silent for so long"
        if reason == "peer frozen" and linked_s < machine.FROZEN_S:
            yield "the peer cannot have been frozen for so long"
        if reason == "deadline" and self._opened is not None:
            deadline_ms = self._opened.record.argument
            is_due = (at_ns - self._opened.at_ns) / 1e9 + SLACK_S >= deadline_ms / 1000
            if deadline_ms == MAX_ARGUMENT or not is_due:
                yield "the deadline had not passed"

    def _record_owed(self, actions: Actions, entry: Entry) -> Iterator[str]:
        """Note which record about the blocks must follow a step (freed or handed to the sequence).
        Yield a broken rule if the attempt has no blocks, or was committed without all cells."""
        owed = [OWED_RECORDS[action] for action in actions if action in OWED_RECORDS]
        if owed and not self._has_blocks:
            yield "the attempt has no blocks"
        if Action.COMMIT in actions and self._cells != self._expected_cells:
            yield f"committed with {self._cells} of {self._expected_cells} cells"
        if owed:
            self._owed = (owed[0], entry)

    def _check_kind(self, entry: Entry) -> Iterator[str]:
        record, phase = entry.record, self.state.phase
        match record.kind:
            case RecordKind.OPENED:
                if self._opened is not None:
                    yield "opened twice"
                self._opened = entry
            case RecordKind.TAKEN:
                if self._has_blocks:
                    yield "blocks were taken twice"
                elif self.state.final:
                    yield "blocks were taken after the attempt had ended"
                self._has_blocks = True
                self._expected_cells, self._cells = record.argument, 0
            case RecordKind.FREED | RecordKind.HANDED:
                if self._owed is None or self._owed[0] is not record.kind:
                    yield "the machine did not order this"
                self._has_blocks, self._owed = False, None
            case RecordKind.UNDONE:
                if self._owed is None or self._owed[0] is not RecordKind.HANDED:
                    yield "there is no commit to undo"
                self.state, self._owed = self._before, None
            case RecordKind.SENT:
                if not self._has_blocks:
                    yield "a frame was sent from blocks that the attempt does not have"
            case RecordKind.WRITTEN:
                self._cells += record.argument
                if not self._has_blocks or phase is not Phase.RECEIVING:
                    yield "a frame was written into blocks that the attempt does not have"
                elif self._cells > self._expected_cells:
                    yield f"{self._cells} cells written, but {self._expected_cells} were requested"
            case RecordKind.LATE if phase is Phase.RECEIVING:
                yield "a frame was dropped as late while the attempt was receiving"
            case _:
                pass


@dataclass(frozen=True, slots=True)
class Violation:
    """A record that breaks a rule, with the attempt's records before and after it as lines of
    text."""

    attempt: bytes
    rule: str
    entry: Entry
    around: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((f"attempt {self.attempt.hex()}: {self.rule}", *self.around))


def check(recordings: Iterable[Recording]) -> list[Violation]:
    """Return every violation in the recordings; empty if the processes did what the state machine
    says."""
    timeline = merge(recordings)
    ends = [_end(recording) for recording in timeline.recordings]
    violations = []
    for attempt, entries in timeline.attempts().items():
        sides = _by_side(entries)
        broken_rules = [*_check_sides(timeline, sides, ends), *_check_pairs(timeline, sides)]
        for entry, rule in broken_rules:
            violations.append(Violation(attempt, rule, entry, _around(timeline, entries, entry)))
    return violations


def _end(recording: Recording) -> tuple[int, bool]:
    """Return (sequence of the engine thread's last record, whether the process recorded its own
    end)."""
    for record in reversed(recording.records):
        if record.event is not None or record.kind in BY_ENGINE:
            return record.sequence, recording.records[-1].kind is RecordKind.END
    return 0, False


def _around(timeline: Timeline, entries: Sequence[Entry], entry: Entry) -> tuple[str, ...]:
    index = entries.index(entry)
    lines = []
    for other in entries[max(0, index - AROUND) : index + AROUND + 1]:
        recording, ms = timeline.of(other), (other.at_ns - entry.at_ns) / 1e6
        lines.append(
            f"{'>' if other is entry else ' '} {ms:+11.3f} ms {recording.name} "
            f"{other.record.side}: {describe(recording, other.record)}"
        )
    return tuple(lines)


def _by_side(entries: Sequence[Entry]) -> Sides:
    sides: Sides = {}
    for entry in entries:
        sides.setdefault(entry.record.side, {}).setdefault(entry.source, []).append(entry)
    return sides


def _check_sides(
    timeline: Timeline, sides: Sides, ends: Sequence[tuple[int, bool]]
) -> Iterator[BrokenRule]:
    """Yield the rules that the records of each side break, in each process separately."""
    for side, sources in sides.items():
        for source, entries in sources.items():
            recording = timeline.recordings[source]
            if side in (ROUTE, FOLLOW):
                yield from _opened_and_closed(recording, entries)
                if (
                    side == FOLLOW
                    and ends[source][1]
                    and entries[-1].record.kind is RecordKind.OPENED
                ):
                    yield entries[-1], "the follower still waited when the process ended in order"
                continue
            replay = Replay(recording, entries[0])
            if not replay.begins:
                yield entries[0], NOT_OPENED
            for entry in entries:
                for rule in replay.take(entry):
                    yield entry, rule
            yield from replay.end(*ends[source])


def _opened_and_closed(recording: Recording, entries: Sequence[Entry]) -> Iterator[BrokenRule]:
    """Yield a broken rule unless an attempt has one OPENED record and then at most one CLOSED
    record."""
    if recording.damaged:
        return
    opened = closed = False
    for number, entry in enumerate(entries):
        if entry.record.kind is RecordKind.OPENED:
            if opened or closed:
                yield entry, "opened twice"
            opened = True
        elif entry.record.kind is RecordKind.CLOSED:
            if closed:
                yield entry, "closed twice"
            elif not opened and not (recording.lost and number == 0):
                yield entry, NOT_OPENED
            closed = True


def _check_pairs(timeline: Timeline, sides: Sides) -> Iterator[BrokenRule]:
    """Yield the rules broken between sides: what one side learns from another, the other did
    before."""
    for entries in sides.get(FOLLOW, {}).values():
        if RECEIVE in sides:
            yield entries[0], "a follower that waits for another attempt's KV was handed KV"
    for side in (SEND, RECEIVE):
        processes = list(sides.get(side, {}).values())
        if len(processes) > 1:
            yield max(entries[0] for entries in processes), f"two processes {side} the attempt"
            return
    for (cause_side, cause), (effect_side, effect) in ORDER:
        causes = _complete(timeline, sides, cause_side)
        effect_entry = _first(_complete(timeline, sides, effect_side) or (), effect)
        if causes is None or effect_entry is None:
            continue
        cause_entry = _first(causes, cause)
        if cause_entry is None:
            yield effect_entry, f"{effect} on {effect_side} without {cause} on {cause_side}"
        elif timeline.one_host and cause_entry.at_ns > effect_entry.at_ns:
            yield effect_entry, f"{effect} on {effect_side} before {cause} on {cause_side}"
    yield from _frames(timeline, sides)


def _complete(timeline: Timeline, sides: Sides, side: str) -> list[Entry] | None:
    """Return the entries of a side from a process that recorded all of them; None if no process
    did."""
    for entries in sides.get(side, {}).values():
        if entries[0].record.kind is RecordKind.OPENED and not timeline.of(entries[0]).damaged:
            return entries
    return None


def _first(entries: Sequence[Entry], event: str) -> Entry | None:
    return next((e for e in entries if event_name(e.record) == event), None)


def _frames(timeline: Timeline, sides: Sides) -> Iterator[BrokenRule]:
    """Yield a broken rule for each frame that was written before it was sent, never sent, or too
    large."""
    sent = _complete(timeline, sides, SEND)
    written = _complete(timeline, sides, RECEIVE)
    if sent is None or written is None:
        return
    frames = {e.record.detail: e for e in sent if e.record.kind is RecordKind.SENT}
    for entry in written:
        if entry.record.kind is RecordKind.WRITTEN:
            frame = frames.get(entry.record.detail)
            if frame is None:
                yield entry, "the frame was never sent"
            elif entry.record.argument > frame.record.argument:
                yield entry, "more cells were written than the frame has"
            elif timeline.one_host and frame.at_ns > entry.at_ns:
                yield entry, "the frame was written before it was sent"
