"""What a worker reports to one router, and when; time is an argument.

A router that has heard nothing for a second suspects the worker, so two heartbeats fall within one.
A load carries a heartbeat if the router reads it there, so a busy worker sends few others.
Heartbeats without a load go out at slots of the wall clock: a router wakes once for those of many
workers, which halves its cost. Where clocks differ it only wakes more often.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from pdserve.protos import fleet_pb2 as pb

HEARTBEAT_S = 0.44  # most time since the last heartbeat, in a load or alone
SLOT_S = HEARTBEAT_S / 4
ROUNDING = 1e-3  # of a slot
BEAT_S = 0.1  # least time between two in loads: routers count their looks at the engine
LOAD_INTERVAL_S = 0.05  # least time between two loads if one of LOAD_FIELDS has changed ...
STEADY_INTERVAL_S = 0.1  # ... and if only blocks and counters have changed
# Fields that change when requests come, go or wait, not with every token.
LOAD_FIELDS = (
    "running",
    "waiting",
    "waiting_tokens",
    "blocks_held",
    "blocks_reserved",
    "preemptions",
    "last_command",
)


class WorkerReports:
    """The reports of one lease after its hello. Any thread may add to them; one takes them."""

    def __init__(self, heartbeat: Callable[[], pb.Heartbeat]) -> None:
        self.wall_offset = 0.0  # from the clock of `now` to the wall clock
        self._heartbeat = heartbeat
        self._lock = threading.Lock()  # guards the load and the goodbye
        self._load: pb.Load | None = None
        self._goodbye: pb.Goodbye | None = None
        self._prefixes: deque[pb.PrefixEvents] = deque()
        self._last_load = pb.Load()
        self._last_load_at = self._last_beat_at = self._next_beat = -math.inf

    def add_load(self, load: pb.Load) -> None:
        """Replace the load to be sent."""
        with self._lock:
            self._load = load

    def add_prefixes(self, events: Sequence[pb.PrefixEvents]) -> None:
        """Add prefix events; all are sent in order."""
        self._prefixes.extend(events)

    def add_goodbye(self, goodbye: pb.Goodbye) -> None:
        """Add the goodbye of a worker that drains or leaves this router."""
        with self._lock:
            self._goodbye = goodbye

    def due(self, now: float) -> Iterator[pb.WorkerReport]:
        """Yield the reports that are due now."""
        with self._lock:
            goodbye, self._goodbye = self._goodbye, None
        if goodbye is not None:
            yield pb.WorkerReport(goodbye=goodbye)
        while self._prefixes:
            yield pb.WorkerReport(prefixes=self._prefixes.popleft())
        load = self._take_load(now)
        if load is not None:
            merges = now >= self._last_beat_at + BEAT_S
            yield pb.WorkerReport(load=load, load_beat=self._beat(now) if merges else None)
        if now >= self._next_beat:
            yield pb.WorkerReport(heartbeat=self._beat(now))

    def next_due(self) -> float:
        """Return when the next report is due if none is added before."""
        return min(self._next_beat, self._load_due())

    def _beat(self, now: float) -> pb.Heartbeat:
        self._last_beat_at = now
        slot = math.floor((now + HEARTBEAT_S + self.wall_offset) / SLOT_S + ROUNDING)
        self._next_beat = slot * SLOT_S - self.wall_offset
        return self._heartbeat()

    def _load_due(self) -> float:
        load = self._load
        if load is None:
            return math.inf
        return self._last_load_at + load_interval_s(self._last_load, load)

    def _take_load(self, now: float) -> pb.Load | None:
        with self._lock:
            if now < self._load_due():
                return None
            load, self._load = self._load, None
        if load is not None:
            self._last_load, self._last_load_at = load, now
        return load


def load_interval_s(last_load: pb.Load, load: pb.Load) -> float:
    """Return how long after `last_load` the next load may go out."""
    steady = all(getattr(last_load, name) == getattr(load, name) for name in LOAD_FIELDS)
    return STEADY_INTERVAL_S if steady else LOAD_INTERVAL_S
