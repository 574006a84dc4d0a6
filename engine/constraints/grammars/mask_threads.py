"""Threads on which grammars compute the next masks while the forward pass runs."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

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

    Those that a step waits for come first. What is behind a slow task at the next `start` gets
    another thread.
    """

    def __init__(self) -> None:
        self._quick = _Lane(NUM_THREADS, "masks")
        self._slow = _Lane(NUM_SLOW_THREADS, "slow-masks")

    def add(self, task: MaskTask, *, awaited: bool) -> None:
        """`awaited`: the next step waits for it, so it should be fast."""
        lane = self._slow if task.is_slow else self._quick
        lane.add(task, awaited)

    def start(self) -> None:
        self._quick.start()
        self._slow.start()

    def close(self) -> None:
        self._quick.close()
        self._slow.close()


class _Lane:
    """Some threads and the tasks that they take."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._awaited: deque[MaskTask] = deque()
        self._others: deque[MaskTask] = deque()
        self._num_new = 0  # of those awaited, since the last start
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, name)

    def add(self, task: MaskTask, awaited: bool) -> None:
        self._num_new += awaited
        (self._awaited if awaited else self._others).append(task)

    def start(self) -> None:
        # What was not begun since the start before is behind a slow task: a thread for each of it.
        left = max(0, len(self._awaited) - self._num_new)
        wanted = left + -(-self._num_new // TASKS_PER_THREAD) + len(self._others)
        self._num_new = 0
        for _ in range(min(self._num_threads, wanted)):
            self._threads.submit(self._work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            task.run()

    def _next(self) -> MaskTask | None:
        for tasks in (self._awaited, self._others):
            try:
                return tasks.popleft()
            except IndexError:
                continue
        return None
