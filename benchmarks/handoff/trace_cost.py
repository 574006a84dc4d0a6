"""What one record of a hand-off costs: `python -m benchmarks.handoff.trace_cost`.

Nanoseconds of this thread's processor time for a mark and for a step, without a ring and with one,
the fastest of several stretches, since other programs can only add.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pdserve.engine.handoff.protocol.machine import Filled, Handoff, Phase, Side, step
from pdserve.engine.handoff.recorder.event_log import EventLog, RecordKind
from pdserve.engine.handoff.recorder.ring import Ring

STRETCHES, CALLS = 20, 20_000
ATTEMPT = os.urandom(16)
STATE = Handoff(Side.RECEIVE, float("inf"), Phase.RECEIVING)


def mark(trace: EventLog) -> None:
    trace.mark(RecordKind.WRITTEN, ATTEMPT, STATE, 5, 30)


def transition(trace: EventLog) -> None:
    trace.step(ATTEMPT, EVENT, STATE, AFTER, ACTIONS)


EVENT = Filled()
AFTER, ACTIONS = step(STATE, EVENT, 0.0)


def nanoseconds(call: Callable[[EventLog], None], trace: EventLog) -> float:
    best = float("inf")
    for _ in range(STRETCHES):
        start = time.thread_time()
        for _ in range(CALLS):
            call(trace)
        best = min(best, time.thread_time() - start)
    return best / CALLS * 1e9


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ring = Ring(Path(folder) / "a.ring", "decode", os.urandom(16), 2 << 20)
        for name, trace in (("no ring", EventLog()), ("ring", EventLog(ring))):
            costs = (nanoseconds(mark, trace), nanoseconds(transition, trace))
            print(f"{name}: a mark {costs[0]:.0f} ns, a step {costs[1]:.0f} ns")
        ring.close()


if __name__ == "__main__":
    main()
