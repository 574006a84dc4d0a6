"""The engine's thread: the only one that uses the Engine between start() and close().

Every turn of the thread moves its LivenessCounter. During a step the counter also moves by itself
once a second, for a multiple of the time that the step should take. A chunk that takes a minute on
a slow machine therefore counts as alive; a step that hangs counts as dead after that time.

Each turn runs the posted calls, then the polls, then an engine step. Only close() ends the thread:
errors are logged, and the requests concerned fail. After the device is lost, the thread runs no
steps.
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
    """Monotonic counter: the engine's thread calls `beat`, any thread calls `read`."""

    def __init__(self) -> None:
        self._last = (0, 0.0, 0.0)  # count, time of the beat, seconds it moves by itself

    def beat(self, now: float, expected_s: float = 0.0) -> None:
        """Record the start of a turn, or of a step that should take `expected_s` seconds."""
        self._last = (self.read(now) + 1, now, SLACK * expected_s)

    def read(self, now: float) -> int:
        """Return the counter's value."""
        count, since, moving_s = self._last
        return count + int(max(0.0, min(now - since, moving_s)) / MOVES_S)


class EngineThread:
    """Runs an engine and calls `on_step`, which must not block.

    Events that a plan already has (Scheduled) arrive before the step is computed, as a step without
    rows; so `on_step` may read the engine but must not change it.
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
        """Counter that moves with every turn and, within a step, once a second for as long as the
        step may take; any thread may read it."""
        return self._liveness.read(time.monotonic())

    @property
    def busy(self) -> bool:
        """Whether the thread has work, so that its counter should move; any thread may read it."""
        return not self._resting or bool(self._posted)

    @property
    def lost(self) -> str:
        """Why the device is lost; empty while it works. No event ends its requests: a worker's
        router places them elsewhere, and in-process callers check this property. Any thread may
        read it."""
        return self._lost

    def passes_over(self, key: str) -> bool:
        """Whether the current or last step has rows of other requests only; any thread may call it.
        False if that step has no rows."""
        plan = self._step_plan
        rows = plan.rows if plan is not None else ()
        return bool(rows) and all(row.sequence.job.request.key != key for row in rows)

    def stack(self) -> str:
        """Return the thread's stack as text; any thread may call it."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return (
            "".join(traceback.format_stack(frame))
            if frame is not None
            else "the engine thread is not running"
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after its turn, cancel calls still posted, and close the engine."""
        with self._woken:
            self._closing = True
            self._woken.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._cancel_posted()
        self._engine.close()

    def post(self, fn: Callable[[Engine], object]) -> "Future[Any]":
        """Call fn(engine) between steps, in posting order; the future has its result, and is
        cancelled after `close`."""
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
        """Call fn() in every turn; it returns True if it has more to do at once."""
        with self._woken:
            self._polls = [*self._polls, fn]
            self._wake = True
            self._woken.notify()

    def wake(self) -> None:
        """Make an idle thread take a turn, so that the polls run."""
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
                log.exception("a poll of the engine thread failed")
        return more

    def _step(self) -> bool:
        """Run one step; return False if the engine had nothing to do."""
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
        """Plan the next step; pass on its first events at once."""
        plan = self._step_plan = self._engine.schedule()
        if plan is not None and plan.events:
            self._send_events(self._engine.announce(plan))
        return plan

    def _launch(self) -> Pending | None:
        """Start the next step; return None if there is nothing to do."""
        plan = self._plan()
        if plan is None:
            return None
        self._record_step(plan)
        return self._engine.launch(plan)

    def _record_step(self, plan: Plan) -> None:
        """Record the step that this thread waits for from now on."""
        self._step_plan = plan
        self._liveness.beat(time.monotonic(), self._engine.expected_s(plan))

    def _fail_requests(self, error: Exception) -> bool:
        """Fail all requests; return False if that raises: the next turn comes after a second."""
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
            log.exception("on_step raised an error for step %d", step.index)

    def _cancel_posted(self) -> None:
        while self._posted:
            self._posted.popleft()[1].cancel()
