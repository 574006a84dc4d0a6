"""The end times of the fast model's steps, shared by its process and the clients that time it."""

import mmap
from bisect import bisect_right
from pathlib import Path

import numpy as np

MARKS = 64  # steps after which the tokens repeat
CAPACITY = 1 << 20
SLOT = 8


class StepClock:
    """A file with the number of steps so far and the time of each; one process writes it."""

    def __init__(self, path: str) -> None:
        with Path(path).open("a+b") as file:
            file.truncate((CAPACITY + 1) * SLOT)
            self._map = mmap.mmap(file.fileno(), (CAPACITY + 1) * SLOT)
        self._count = np.frombuffer(self._map, np.int64, 1)
        self._times = np.frombuffer(self._map, np.float64, CAPACITY, SLOT)

    def tick(self, now: float) -> int:
        """Record a step and return its number, from 0."""
        step = int(self._count[0])
        self._times[step] = now
        self._count[0] = step + 1
        return step

    def times(self) -> list[float]:
        """The times of all steps so far."""
        return self._times[: int(self._count[0])].tolist()


def latency_s(times: list[float], mark: int, arrived: float) -> float:
    """The time from the end of the last step with that mark to `arrived`."""
    step = bisect_right(times, arrived) - 1
    step -= (step - mark) % MARKS
    return arrived - times[step]
