"""The engine's thread: the only one that uses the Engine between start() and close().

The thread works in turns: each turn runs the posted calls, then the polls, then an engine step.
Only close() ends the thread: errors are logged, and the requests concerned fail. After the device
is lost, the thread runs no more steps.

Every turn moves the thread's LivenessCounter. During a step the counter also moves by itself once a
second, for at most a multiple of the time that the step should take. So a chunk that takes a minute
on a slow machine counts as alive, and a step that hangs counts as dead after that time.
"""

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pdserve.engine.api import Step
from pdserve.engine.engine import Engine, Pending
from pdserve.engine.execution import DeviceLost
from pdserve.engine.scheduling import Plan

MOVES_S = 1.0  # a live thread with work moves the counter at least this often
SLACK = 10.0  # times the expected time of a step: other load or long contexts may stretch it
log = logging.getLogger(__name__)
IDLE_TURN_S = 1.0  # so that an engine that waits for blocks still takes turns and looks alive


class LivenessCounter:
    """Counter that grows while the engine's thread is alive. The engine's thread calls `beat`; any
    thread may call `read`."""

    def __init__(self) -> None:
        self._last = (0, 0.0, 0.0)  # count, time of the beat, seconds it moves by itself

    def beat(self, now: float, expected_s: float = 0.0) -> None:
        """Move the counter at the start of a turn, or of a step that should take `expected_s`
        seconds. `now`: current time in seconds."""
        self._last = (self.read(now) + 1, now, SLACK * expected_s)

    def read(self, now: float) -> int:
        """Return the counter's value at the time `now`, in seconds."""
        count, since, moving_s = self._last
        return count + int(max(0.0, min(now - since, moving_s)) / MOVES_S)


class EngineThread:
    """Thread that runs an engine and passes each Step to `on_step`, which must not block.

    Events that are known when a step is planned (Scheduled) are passed on before the step is
    computed, as a Step without rows. So `on_step` may read the engine but must not change it.
    """

    def __init__(self, engine: Engine, on_step: Callable[[Step], None]) -> None:
        self._engine = engine
        self._on_step = on_step
        self._posted: deque[tuple[Callable[[Engine], object], Future[Any]]] = deque()
        self._polls: list[Callable[[], bool]] = []
        self._woken = threading.Condition()
        self._wake = False
        self._closing = False
        self._resting = True  # nothing is queued; the thread waits for a wake-up
        self._liveness = LivenessCounter()
        self._step_plan: Plan | None = None  # of the current or last step
        self._ahead: Pending | None = None  # launched before its predecessor was collected
        self._lost = ""
        engine.wake_with(self.wake)
        self._thread = threading.Thread(target=self._run, name="engine")

    @property
    def liveness(self) -> int:
        """Value of the thread's LivenessCounter, which grows with every turn and, within a step,
        once a second for as long as the step may take; any thread may read it."""
        return self._liveness.read(time.monotonic())

    @property
    def busy(self) -> bool:
        """Whether the thread has work, so that `liveness` must grow unless the thread hangs; any
        thread may read it."""
        return not self._resting or bool(self._posted)

    @property
    def lost(self) -> str:
        """Error because of which the device is lost; empty while the device works. Any thread may
        read it.

        After the loss no event ends the engine's requests: a worker's router sends them to other
        workers, and callers in the same process must check this property.
        """
        return self._lost

    def passes_over(self, key: str) -> bool:
        """Whether the current or last step computes rows of other requests but none of the request
        `key`; any thread may call this method. False if that step has no rows."""
        plan = self._step_plan
        rows = plan.rows if plan is not None else ()
        return bool(rows) and all(row.sequence.job.request.key != key for row in rows)

    def stack(self) -> str:
        """Return the call stack of the engine's thread as text, for diagnosis; any thread may call
        this method."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return (
            "".join(traceback.format_stack(frame))
            if frame is not None
            else "the engine thread is not running"
        )

    def start(self) -> None:
        """Start the thread, which begins to run engine steps."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current turn, cancel posted calls that have not run, and close
        the engine."""
        with self._woken:
            self._closing = True
            self._woken.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._cancel_posted()
        self._engine.close()

    def post(self, fn: Callable[[Engine], object]) -> "Future[Any]":
        """Have the engine's thread call fn(engine) between steps, in the order of posting. Return a
        future of the result; it is cancelled if the thread is closed before the call. Any thread
        may call this method."""
        future: Future[Any] = Future()
        with self._woken:
            if self._closing:
                future.cancel()
                return future
            self._posted.append((fn, future))
            self._wake = True
            self._woken.notify()
        return future

    def add_poll(self, fn: Callable[[], bool]) -> None:
        """Have the engine's thread call fn() in every turn; fn returns True if the next turn should
        follow at once."""
        with self._woken:
            self._polls = [*self._polls, fn]
            self._wake = True
            self._woken.notify()

    def wake(self) -> None:
        """Make the engine's thread take a turn if it is idle, so that the polls run."""
        with self._woken:
            self._wake = True
            self._woken.notify()

    def _run(self) -> None:
        self._resting = False
        while not self._closing:
            self._liveness.beat(time.monotonic())
            self._run_posted()
            more = self._poll()
            if not self._step() and not more:
                self._idle()

    def _idle(self) -> None:
        with self._woken:
            if not self._wake and not self._closing:
                self._resting = not self._engine.has_work
                self._woken.wait(None if self._resting else IDLE_TURN_S)
                self._resting = False
            self._wake = False

    def _run_posted(self) -> None:
        for _ in range(len(self._posted)):
            fn, future = self._posted.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = fn(self._engine)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _poll(self) -> bool:
        more = False
        for poll in self._polls:
            try:
                more |= poll()
            except Exception:
                log.exception("a polled function raised an error; the engine thread continues")
        return more

    def _step(self) -> bool:
        """Run one engine step; return False if there was nothing to do."""
        if self._lost:
            return False
        try:
            pending, self._ahead = self._ahead, None
            if pending is None:
                pending = self._launch()
            else:
                self._record_step(pending.plan)
            if pending is not None:
                self._ahead = self._engine.launch_ahead(pending)
                self._send_events(self._engine.collect(pending))
        except DeviceLost as error:
            log.critical("the device is lost; the engine stops computing steps", exc_info=error)
            self._lost = str(error)
            return True  # so that the polls notice the loss at once
        except Exception as error:
            return self._fail_requests(error)
        return pending is not None

    def _plan(self) -> Plan | None:
        """Plan the next step, and pass on at once the events that are already known."""
        plan = self._step_plan = self._engine.schedule()
        if plan is not None and plan.events:
            self._send_events(self._engine.announce(plan))
        return plan

    def _launch(self) -> Pending | None:
        """Plan and start the next step; return None if there is nothing to do."""
        plan = self._plan()
        if plan is None:
            return None
        self._record_step(plan)
        return self._engine.launch(plan)

    def _record_step(self, plan: Plan) -> None:
        """Record the plan that the thread is about to wait for, and the time that it should take,
        for `liveness` and `passes_over`."""
        self._step_plan = plan
        self._liveness.beat(time.monotonic(), self._engine.expected_s(plan))

    def _fail_requests(self, error: Exception) -> bool:
        """Fail all queued and running requests because of this error. Return False if failing them
        raises an error too; the next turn then follows after a pause."""
        log.error("an engine step failed; all requests of the engine fail", exc_info=error)
        try:
            self._engine.fail_all(f"{type(error).__name__}: {error}")
        except Exception:
            log.critical(
                "failing the requests raised an error; the thread continues after a pause",
                exc_info=True,
            )
            return False
        return True

    def _send_events(self, step: Step) -> None:
        try:
            self._on_step(step)
        except Exception:
            log.exception("the on_step callback raised an error for step %d", step.index)

    def _cancel_posted(self) -> None:
        while self._posted:
            self._posted.popleft()[1].cancel()
