"""The cost of one record of a hand-off: `python benchmarks/kv_transfer/record_cost.py`.

Nanoseconds of this thread's processor time for a record and a step, without a ring and with one,
the fastest of several stretches, since other programs can only add.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pdserve.engine.handoff.protocol import Filled, Handoff, Phase, Side, step
from pdserve.engine.handoff.recorder import EventLog, RecordKind
from pdserve.engine.handoff.recorder.ring import Ring

STRETCHES, CALLS = 20, 20_000
ATTEMPT = os.urandom(16)
STATE = Handoff(Side.RECEIVE, float("inf"), Phase.RECEIVING)


def record(event_log: EventLog) -> None:
    event_log.record(RecordKind.WRITTEN, ATTEMPT, STATE, 5, 30)


def transition(event_log: EventLog) -> None:
    event_log.step(ATTEMPT, EVENT, STATE, AFTER, ACTIONS)


EVENT = Filled()
AFTER, ACTIONS = step(STATE, EVENT, 0.0)


def nanoseconds(call: Callable[[EventLog], None], event_log: EventLog) -> float:
    best = float("inf")
    for _ in range(STRETCHES):
        start = time.thread_time()
        for _ in range(CALLS):
            call(event_log)
        best = min(best, time.thread_time() - start)
    return best / CALLS * 1e9


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ring = Ring(Path(folder) / "a.ring", "decode", os.urandom(16), 2 << 20)
        for name, event_log in (("no ring", EventLog()), ("ring", EventLog(ring))):
            costs = (nanoseconds(record, event_log), nanoseconds(transition, event_log))
            print(f"{name}: a record {costs[0]:.0f} ns, a step {costs[1]:.0f} ns")
        ring.close()


if __name__ == "__main__":
    main()
