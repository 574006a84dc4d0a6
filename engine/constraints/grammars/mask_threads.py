"""Threads on which grammars compute the next bitmasks while the forward pass runs."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from pdserve.engine.constraints.grammars.thread_pool import FairThreadPool

NUM_THREADS = 4  # so that a few slow grammars leave threads to the others
NUM_SLOW_THREADS = 2  # of their own for tasks that are known to be slow
# Most masks take microseconds, less than it takes to wake a thread: one computes several of them.
TASKS_PER_THREAD = 16


class MaskTask(Protocol):
    """What computes one mask."""

    @property
    def is_slow(self) -> bool:
        """Whether it is known to take long."""

    def run(self) -> None: ...


class MaskThreads:
    """Tasks are collected by `add` and begun by `start`: two calls for all tasks of a step.

    Those that a step waits for come first, the others by tenants in turn. What is behind a slow
    task at the next `start` gets another thread. One thread calls this.
    """

    def __init__(self) -> None:
        self._quick = FairThreadPool[MaskTask](NUM_THREADS, "masks")
        self._slow = FairThreadPool[MaskTask](NUM_SLOW_THREADS, "slow-masks")
        self._num_new = 0  # of those awaited, since the last start
        self._told = threading.Condition()
        self._is_waiting = False

    def add(self, task: MaskTask, tenant: bytes, *, awaited: bool) -> None:
        """`awaited`: the next step waits for it, so it should be fast."""
        if task.is_slow:
            self._slow.add(task, tenant)
        elif awaited:
            self._num_new += 1
            self._quick.add_urgent(task)
        else:
            self._quick.add(task, tenant)

    def start(self) -> None:
        # What was not begun since the start before is behind a slow task: a thread for each of it.
        left = max(0, self._quick.num_urgent - self._num_new)
        new = -(-self._num_new // TASKS_PER_THREAD)
        self._num_new = 0
        self._quick.start(left + new + self._quick.num_waiting)
        self._slow.start(self._slow.num_waiting)

    def tell(self) -> None:
        """A mask is there; on a mask thread. To wake nobody costs nothing, and nearly always every
        mask is there before a step waits for one."""
        if self._is_waiting:
            with self._told:
                self._told.notify_all()

    def wait(self, is_there: Callable[[], bool], until_s: float) -> bool:
        """Waits for a mask, until a time of perf_counter; whether it is there."""
        with self._told:
            self._is_waiting = True  # before the first look, so that `tell` cannot be missed
            try:
                return self._told.wait_for(is_there, max(0.0, until_s - time.perf_counter()))
            finally:
                self._is_waiting = False

    def close(self) -> None:
        self._quick.close()
        self._slow.close()
