"""Threads on which grammars compute the next masks while the forward pass runs."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

NUM_THREADS = 4
NUM_SLOW_THREADS = 2  # of their own for tasks that are known to be slow, so that others pass these


class MaskTask(Protocol):
    """What computes one mask."""

    @property
    def is_slow(self) -> bool:
        """Whether it is known to take long."""

    def run(self) -> None: ...


class MaskThreads:
    """Tasks are collected by `add` and begun by `start`: two calls for all tasks of a step."""

    def __init__(self) -> None:
        self._quick = _Lane(NUM_THREADS, "masks")
        self._slow = _Lane(NUM_SLOW_THREADS, "slow-masks")

    def add(self, task: MaskTask) -> None:
        (self._slow if task.is_slow else self._quick).tasks.append(task)

    def start(self) -> None:
        self._quick.start()
        self._slow.start()

    def close(self) -> None:
        self._quick.close()
        self._slow.close()


class _Lane:
    """Some threads and the tasks that they take in order."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.tasks: deque[MaskTask] = deque()
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, name)

    def start(self) -> None:
        for _ in range(min(self._num_threads, len(self.tasks))):
            self._threads.submit(self._work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        while True:
            try:
                task = self.tasks.popleft()
            except IndexError:
                return
            task.run()
