"""Time on a device, by CUDA events; on the fake device, by the host's clock."""

import time
from collections.abc import Callable
from typing import Any

import torch


class HostEvent:
    """A torch.cuda.Event of a device that has finished all work when a launch returns."""

    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self, stream: object = None) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "HostEvent") -> float:
        """Milliseconds from this event to `end`."""
        return 1000 * (end._at_s - self._at_s)


def make_event(device: str) -> Any:
    return HostEvent() if device == "cpu" else torch.cuda.Event(enable_timing=True)


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds_of(
    device: str, launch: Callable[[], object], count: int = 20, warm_up: int = 3
) -> float:
    """The mean time of `count` consecutive launches."""
    if device == "cpu":
        count, warm_up = 1, 0
    for _ in range(warm_up):
        launch()
    wait(device)
    start, end = make_event(device), make_event(device)
    start.record()
    for _ in range(count):
        launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / count
