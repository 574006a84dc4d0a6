"""Threads that compute the next grammar bitmasks while the forward pass runs."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from pdserve.engine.constraints.grammars.thread_pool import FairThreadPool

NUM_THREADS = 4  # so that a few slow grammars leave threads for others
NUM_SLOW_THREADS = 2  # extra threads for tasks known to be slow
# Most masks take microseconds, less than waking a thread: one thread computes several masks.
TASKS_PER_THREAD = 16


class MaskTask(Protocol):
    """A task that computes one mask."""

    @property
    def is_slow(self) -> bool:
        """Whether the task is known to take long."""

    def run(self) -> None: ...


class MaskThreads:
    """Threads for mask tasks; `add` collects and `start` starts them, once per step.

    Tasks that a step waits for come first, the others by tenants in turn. Tasks stuck behind a slow
    one at the next `start` get other threads. Only one thread may call methods other than `notify`.
    """

    def __init__(self) -> None:
        self._quick = FairThreadPool[MaskTask](NUM_THREADS, "masks")
        self._slow = FairThreadPool[MaskTask](NUM_SLOW_THREADS, "slow-masks")
        self._num_new = 0  # awaited tasks added since the last start
        self._mask_ready = threading.Condition()
        self._is_waiting = False

    def add(self, task: MaskTask, tenant: bytes, *, awaited: bool) -> None:
        """Add a task; `awaited`: the next step waits for it, so it should be fast."""
        if task.is_slow:
            self._slow.add(task, tenant)
        elif awaited:
            self._num_new += 1
            self._quick.add_urgent(task)
        else:
            self._quick.add(task, tenant)

    def start(self) -> None:
        # A task not begun since the previous start is behind a slow one: start a thread for each.
        delayed = max(0, self._quick.num_urgent - self._num_new)
        new_threads = -(-self._num_new // TASKS_PER_THREAD)
        self._num_new = 0
        self._quick.start(delayed + new_threads + self._quick.num_waiting)
        self._slow.start(self._slow.num_waiting)

    def notify(self) -> None:
        """Signal, on a mask thread, that a mask is ready. Costs nothing while no step waits, which
        is nearly always the case."""
        if self._is_waiting:
            with self._mask_ready:
                self._mask_ready.notify_all()

    def wait(self, is_ready: Callable[[], bool], until_s: float) -> bool:
        """Wait for a mask until a perf_counter time; return whether it is ready."""
        with self._mask_ready:
            self._is_waiting = True  # before the first look, so that `notify` cannot be missed
            try:
                return self._mask_ready.wait_for(is_ready, max(0.0, until_s - time.perf_counter()))
            finally:
                self._is_waiting = False

    def close(self) -> None:
        self._quick.close()
        self._slow.close()
