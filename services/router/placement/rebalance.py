"""Which running requests go to another decode worker, in which order; pure, time is an argument.

A worker that drains gives all away. One that lives gives a request away only while it preempts:
what one request gains another one computes again, over and over. So the measure is not how busy
workers are but whether one lacks blocks for a while that another one has.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

WINDOW_S = 1.0
MIN_WINDOWS = 2  # in a row with preemptions, before a worker gives a request away; then anew
MIN_LEFT = 32  # tokens that a request may still generate; below, it is soon over
COPIED_PER_TOKEN = 64  # tokens whose KV is copied in about the time of one decode step


@dataclass(frozen=True, slots=True)
class Running:
    """A request that can move."""

    ordinal: int  # of arrival; unique
    num_tokens: int  # whose KV would move
    left: int | None  # tokens that it may still generate; None: as many as fit


def drain_order(running: Iterable[Running]) -> list[Running]:
    """The most urgent first: what may run longest is least likely to end in time by itself."""
    return sorted(running, key=lambda r: (r.left is not None, -(r.left or 0), r.ordinal))


def pays(request: Running) -> bool:
    """Whether what is left of it takes longer than to move it."""
    left = request.left
    return left is None or (left >= MIN_LEFT and left * COPIED_PER_TOKEN >= request.num_tokens)


def relief_order(running: Iterable[Running]) -> list[Running]:
    """What a worker that lacks blocks gives away first: the most blocks, the youngest of equals."""
    worth = [r for r in running if pays(r)]
    return sorted(worth, key=lambda r: (-r.num_tokens, -r.ordinal))


class Pressure:
    """Which workers have preempted in every window of late."""

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}  # preemptions, by boot
        self._windows: dict[bytes, int] = {}  # in a row with more of them
        self._next = 0.0

    def due(self, now: float) -> bool:
        """Whether the next look is of any use."""
        return now >= self._next

    def look(self, preemptions: Mapping[bytes, int], now: float) -> list[bytes]:
        """Those that should give a request away now; `preemptions`: counters by boot."""
        if not self.due(now):
            return []
        self._next = now + WINDOW_S
        pressed = []
        for boot, count in preemptions.items():
            more = count > self._seen.get(boot, count)
            self._windows[boot] = self._windows.get(boot, 0) + 1 if more else 0
            if self._windows[boot] >= MIN_WINDOWS:
                self._windows[boot] = 0
                pressed.append(boot)
        self._seen = dict(preemptions)
        self._windows = {boot: self._windows[boot] for boot in preemptions}
        return pressed

    def calm(self, boot: bytes) -> bool:
        """It did not preempt in the last window."""
        return not self._windows.get(boot)
