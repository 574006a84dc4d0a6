"""Records of hand-offs by processes: checked against the machine, and generated."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from pdserve.engine.handoff.protocol import (
    Action,
    Claimed,
    ClaimGranted,
    Event,
    Filled,
    Handoff,
    Picked,
    Reserved,
    Side,
    step,
)
from pdserve.engine.handoff.recorder import (
    MAX_ARGUMENT,
    SUFFIX,
    EventLog,
    Recording,
    RecordKind,
    check,
    read_rings,
)
from pdserve.engine.handoff.recorder.event_log import Record, RecordSink, event_name

HOST = b"one kernel's id."
CELLS = 6


def assert_conform(folder: Path, may_be_empty: bool = False) -> Counter[tuple[str, str]]:
    """Check that every ring in the folder is whole, and that together they break no rule and are
    not empty.

    Returns how often each (side, event) was recorded. `may_be_empty`: for a test without
    hand-offs.
    """
    recordings = read_rings(sorted(folder.glob(f"*{SUFFIX}")))
    assert not any(recording.damaged for recording in recordings)
    violations = check(recordings)
    assert not violations, "\n\n".join(map(str, violations))
    noted = Counter((r.side, event_name(r)) for one in recordings for r in one.records)
    assert recordings
    assert may_be_empty or any(event == "opened" for _, event in noted), "nothing was recorded"
    return noted


@dataclass
class Notes:
    """A RecordSink in memory; several of one clock (ns) are processes of one host."""

    role: str
    incarnation: bytes
    clock: Callable[[], int]
    records: list[Record] = field(default_factory=list)
    reasons: list[str] = field(default_factory=lambda: [""])

    def append(self, kind: int, attempt: bytes, state: int, detail: int, argument: int) -> None:
        at, number = self.clock(), len(self.records) + 1
        prefix = attempt[:8].ljust(8, b"\0")
        self.records.append(Record(at, int(kind), prefix, number, state, detail, argument))

    def reason_number(self, text: str) -> int:
        if text not in self.reasons:
            self.reasons.append(text)
        return self.reasons.index(text)

    def close(self) -> None:
        """End the process in order."""
        self.append(RecordKind.END, b"", 0, 0, 0)

    def recording(self) -> Recording:
        """Return the recording as a reader of its ring would get it."""
        reasons, records = tuple(self.reasons), list(self.records)
        return Recording(self.role, self.incarnation, HOST, 0, 0, reasons, records)


class Played:
    """One side of a generated hand-off: carries out the machine's actions, and records them."""

    def __init__(self, log: RecordSink, side: Side, attempt: bytes) -> None:
        self.event_log = EventLog(log)
        self.attempt = attempt
        self.state = Handoff(side, float("inf"))
        self.event_log.record(RecordKind.OPENED, attempt, self.state, 3, MAX_ARGUMENT)

    def record(self, kind: RecordKind, detail: int = 0, argument: int = 0) -> None:
        self.event_log.record(kind, self.attempt, self.state, detail, argument)

    def does(self, event: Event, now: float = 0.0) -> None:
        before = self.state
        self.state, actions = step(before, event, now)
        self.event_log.step(self.attempt, event, before, self.state, actions)
        if Action.FREE_BLOCKS in actions:
            self.record(RecordKind.FREED)
        if Action.COMMIT in actions:
            self.record(RecordKind.HANDED)


def play(
    attempt: bytes, request: int, router: RecordSink, decode: RecordSink, prefill: RecordSink
) -> None:
    """Play a hand-off without a fault, as three processes record it."""
    EventLog(router).route(attempt, 1, request)
    receive = Played(decode, Side.RECEIVE, attempt)
    send = Played(prefill, Side.SEND, attempt)
    send.record(RecordKind.TAKEN, 3)
    send.does(Picked())
    receive.does(Claimed())
    receive.record(RecordKind.TAKEN, 3, CELLS)
    receive.does(Reserved())
    send.does(ClaimGranted())
    for frame in (5, 6):
        send.record(RecordKind.SENT, frame, CELLS // 2)
        receive.record(RecordKind.WRITTEN, frame, CELLS // 2)
    receive.does(Filled())
    send.does(Filled())
    EventLog(router).unroute(attempt, "")


def whole_handoff(attempt: bytes, request: int = 1) -> tuple[Notes, Notes, Notes]:
    """Return records of router, decode and prefill for an attempt without a fault, with an orderly
    end of each.
    """
    clock = count(0, 1_000_000).__next__
    roles = ("router", "decode", "prefill")
    router, decode, prefill = (Notes(role, role.encode(), clock) for role in roles)
    play(attempt, request, router, decode, prefill)
    for notes in (router, decode, prefill):
        notes.close()
    return router, decode, prefill
