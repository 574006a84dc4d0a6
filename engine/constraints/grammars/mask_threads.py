"""Threads on which grammars compute the next masks while the forward pass runs."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

NUM_THREADS = 4  # so that a few slow grammars leave threads to the others


class MaskTask(Protocol):
    """What computes one mask."""

    def run(self) -> None: ...


class MaskThreads:
    """Tasks are collected by `add` and begun by `start`: two calls for all tasks of a step."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "masks")
        self._tasks: deque[MaskTask] = deque()

    def add(self, task: MaskTask) -> None:
        self._tasks.append(task)

    def start(self) -> None:
        for _ in range(min(NUM_THREADS, len(self._tasks))):
            self._threads.submit(self._work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        while True:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return
            task.run()
