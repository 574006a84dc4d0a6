"""Checks the event logs of processes against the machine that they run; pure.

Each side of an attempt is replayed (replay.py): phases and actions of every record must be those of
machine.step. In addition:

- blocks are taken once, and freed or handed to the sequence once, when the machine says so;
  no frame is sent or written while the side has no blocks; an orderly end leaves nothing alive
- receive commits only when the new cells of its frames sum up to what it requested
- what one side learns from the other was recorded there first: Picked before Claimed, Reserved
  before Granted, receive's Filled before send's; a frame was sent before it is written, with no
  fewer cells; one process sends an attempt and one receives it
- a router opens an attempt before decode has it, and closes it once
- a follower (services/decode/single_flight) is handed no KV, its wait ends once, and no follower
  waits at an orderly end

Records that were overwritten, or never written because a process died, are no violation: rules that
need them are not applied to their attempt.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.engine.handoff.protocol.machine import Side
from pdserve.engine.handoff.recorder.event_log import FOLLOW, ROUTE, Recording, RecordKind
from pdserve.engine.handoff.recorder.replay import Replay
from pdserve.engine.handoff.recorder.timeline import Entry, Timeline, describe, event_name, merge

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


@dataclass(frozen=True, slots=True)
class Violation:
    """A record that breaks a rule, with text lines about the attempt's records around it."""

    attempt: bytes
    rule: str
    entry: Entry
    around: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((f"attempt {self.attempt.hex()}: {self.rule}", *self.around))


def check(recordings: Iterable[Recording]) -> list[Violation]:
    """Return every violation; empty if these processes did what the machine says."""
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
    """Return (sequence of the engine thread's last record, whether the process ended in order)."""
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
    """Check each side in each process separately."""
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
    """Check that OPENED comes once, then CLOSED once."""
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
    """Check what the sides say about each other."""
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
    """Return the entries of a side in a process that has all of them; None if there is no such
    process."""
    for entries in sides.get(side, {}).values():
        if entries[0].record.kind is RecordKind.OPENED and not timeline.of(entries[0]).damaged:
            return entries
    return None


def _first(entries: Sequence[Entry], event: str) -> Entry | None:
    return next((e for e in entries if event_name(e.record) == event), None)


def _frames(timeline: Timeline, sides: Sides) -> Iterator[BrokenRule]:
    """Check that a frame is written after it was sent."""
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
