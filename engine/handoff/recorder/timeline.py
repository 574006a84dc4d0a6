"""Merges the recordings of several processes into one timeline and describes records; pure.

Processes on one host share a monotonic clock, so their records merge in the order in which they
were made. Records of several hosts merge by the time of day, so the order between hosts is not
reliable.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.engine.handoff.recorder.event_log import (
    FOLLOW,
    MAX_ARGUMENT,
    PEER_NOTIFIED,
    ROUTE,
    Record,
    Recording,
    RecordKind,
)


class Entry(NamedTuple):
    """A record in its place among the records of all processes."""

    at_ns: int
    source: int  # index of its recording
    record: Record


@dataclass(frozen=True, slots=True)
class Timeline:
    """All records of some recordings, in order of time."""

    recordings: tuple[Recording, ...]
    entries: tuple[Entry, ...]
    one_host: bool  # all recordings share one clock

    def of(self, entry: Entry) -> Recording:
        return self.recordings[entry.source]

    def attempts(self) -> dict[bytes, list[Entry]]:
        """Return the entries by the attempt's first eight bytes, in the order in which the attempts
        began."""
        by_attempt: dict[bytes, list[Entry]] = {}
        for entry in self.entries:
            if entry.record.code != RecordKind.END:
                by_attempt.setdefault(entry.record.attempt, []).append(entry)
        return by_attempt


def merge(recordings: Iterable[Recording]) -> Timeline:
    """Merge recordings, each with its records in order, into one timeline."""
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
    """Return the machine event ("claim granted", "tick", ...) or kind ("opened", ...) in lower
    case."""
    if record.event is None:
        return RecordKind(record.code).name.lower()
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", record.event.__name__).lower()
