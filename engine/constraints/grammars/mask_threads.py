"""Threads on which grammars compute the next masks while the forward pass runs."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

NUM_THREADS = 4  # so that a few slow grammars leave threads to the others
# Most masks take microseconds, less than it takes to wake a thread: one computes several of them.
TASKS_PER_THREAD = 8


class MaskTask(Protocol):
    """What computes one mask."""

    def run(self) -> None: ...


class MaskThreads:
    """Tasks are collected by `add` and begun by `start`: two calls for all tasks of a step.

    Those that a step waits for come first. What is behind a slow task at the next `start` gets
    another thread.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "masks")
        self._awaited: deque[MaskTask] = deque()
        self._others: deque[MaskTask] = deque()

    def add(self, task: MaskTask, *, awaited: bool) -> None:
        """`awaited`: the next step waits for it, so it should be fast."""
        (self._awaited if awaited else self._others).append(task)

    def start(self) -> None:
        wanted = -(-len(self._awaited) // TASKS_PER_THREAD) + len(self._others)
        for _ in range(min(NUM_THREADS, wanted)):
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
