"""Evidence of a fault in the rings: whether it struck at its moment, and how soon it was noticed.

`Watch` reads the rings of running processes as they grow; `Evidence` all records at the end. Times
are readings of the one monotonic clock, in ns.
"""

import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.engine.handoff.protocol import Side
from pdserve.engine.handoff.recorder import (
    ROUTE,
    SUFFIX,
    Entry,
    RecordKind,
    check,
    merge,
    read_rings,
)
from pdserve.engine.handoff.recorder.event_log import (
    RECORD_BYTES,
    SIDES,
    Record,
    event_name,
    unpack,
)
from pdserve.engine.handoff.recorder.ring import HEADER_BYTES, POSITION_AT

SEND, RECEIVE = Side.SEND.value, Side.RECEIVE.value
EARLY = 3  # frames; the prompts of the chaos runs have six or more
NOTICED_S = 10.0  # tries that a router closes later have another cause


class Watch:
    """Hand-offs that one live prefill worker is sending."""

    def __init__(self, folder: Path, incarnation: bytes) -> None:
        (path,) = folder.glob(f"prefill-{incarnation.hex()[:12]}{SUFFIX}")
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._capacity = (len(self._map) - HEADER_BYTES) // RECORD_BYTES
        self._seen = int.from_bytes(self._map[POSITION_AT : POSITION_AT + 8], "little")
        self.frames: Counter[bytes] = Counter()  # by attempt that is not over

    def sending(self) -> set[bytes]:
        """Return attempts that have sent a frame, but not many, and hold their blocks."""
        for record in self._new():
            if record.kind is RecordKind.SENT:
                self.frames[record.attempt] += 1
            elif record.kind is RecordKind.FREED:
                self.frames.pop(record.attempt, None)
        return {attempt for attempt, sent in self.frames.items() if sent <= EARLY}

    def _new(self) -> Iterator[Record]:
        position = int.from_bytes(self._map[POSITION_AT : POSITION_AT + 8], "little")
        for sequence in range(self._seen + 1, position + 1):
            at = HEADER_BYTES + sequence % self._capacity * RECORD_BYTES
            record = unpack(self._map[at : at + RECORD_BYTES])
            if record is not None:
                yield record
        self._seen = position


@dataclass(frozen=True)
class Handoff:
    """One attempt, from the records of all processes."""

    opened_ns: int = 0  # by the router
    closed_ns: int = 0
    reason: str = ""
    sent: tuple[int, ...] = ()  # when each frame was
    sender: bytes = b""  # incarnation
    receiver: bytes = b""
    filled_ns: int = 0  # at decode: every cell was there
    freed_ns: dict[str, int] = field(default_factory=dict)  # by side


class Evidence:
    """All rings of a folder, merged; `violations`: broken rules, in words."""

    def __init__(self, folder: Path) -> None:
        recordings = read_rings(sorted(folder.glob(f"*{SUFFIX}")))
        self.violations = [str(violation) for violation in check(recordings)]
        self.damaged = sum(recording.damaged for recording in recordings)
        timeline = merge(recordings)
        self.handoffs: dict[bytes, Handoff] = {}
        for attempt, entries in timeline.attempts().items():
            found: dict[str, list[Entry]] = {side: [] for side in SIDES}
            for entry in entries:
                found[entry.record.side].append(entry)
            closed = next((e for e in found[ROUTE] if e.record.kind is RecordKind.CLOSED), None)
            self.handoffs[attempt] = Handoff(
                opened_ns=next((e.at_ns for e in found[ROUTE]), 0),
                closed_ns=closed.at_ns if closed else 0,
                reason=timeline.of(closed).reason(closed.record.detail) if closed else "",
                sent=tuple(e.at_ns for e in found[SEND] if e.record.kind is RecordKind.SENT),
                sender=timeline.of(found[SEND][0]).incarnation if found[SEND] else b"",
                receiver=timeline.of(found[RECEIVE][0]).incarnation if found[RECEIVE] else b"",
                filled_ns=next(
                    (e.at_ns for e in found[RECEIVE] if event_name(e.record) == "filled"), 0
                ),
                freed_ns={
                    side: e.at_ns
                    for side in (SEND, RECEIVE)
                    for e in found[side]
                    if e.record.kind is RecordKind.FREED
                },
            )

    def in_transfer(self, sender: bytes, at_ns: int) -> list[Handoff]:
        """Return hand-offs of a prefill worker that were between first and last frame at that
        time.
        """
        return [
            h for h in self.handoffs.values()
            if h.sender == sender and h.sent and h.sent[0] < at_ns
            and not 0 < h.filled_ns < at_ns and not 0 < h.closed_ns < at_ns
            and not 0 < h.freed_ns.get(SEND, 0) < at_ns
        ]  # fmt: skip

    def noticed(self, address: str, incarnation: bytes, at_ns: int) -> list[float]:
        """Return seconds from a fault of the worker to each time that the router gave up a try of
        it: by itself, with the worker's address as the reason, or because the other side of the
        hand-off lost it first and reported the connection's end.
        """
        return [
            (h.closed_ns - at_ns) / 1e9
            for h in self.handoffs.values()
            if 0 <= h.closed_ns - at_ns < NOTICED_S * 1e9
            and (address in h.reason or (h.reason and incarnation in (h.sender, h.receiver)))
        ]

    def closed_since(self, at_ns: int) -> list[tuple[float, str]]:
        """Return when tries were given up since then, in seconds, and why."""
        return sorted(
            ((h.closed_ns - at_ns) / 1e9, h.reason)
            for h in self.handoffs.values()
            if h.closed_ns >= at_ns
        )

    def given_back(self, incarnation: bytes, at_ns: int) -> list[float]:
        """Return seconds from a worker's death until the blocks of its hand-offs were free
        elsewhere.
        """
        found = []
        for h in self.handoffs.values():
            other = (
                RECEIVE if h.sender == incarnation else SEND if h.receiver == incarnation else ""
            )
            freed = h.freed_ns.get(other, 0)
            if freed >= at_ns:
                found.append((freed - at_ns) / 1e9)
        return found
