"""Which running requests migrate to another decode worker, in which order. Pure; time is an
argument.

A draining worker sends all its requests away. A live one sends a request away only while it
preempts: each preemption frees blocks for one request by recomputing another, over and over. So the
measure is not load, but whether a worker has lacked blocks for a while that another one has.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

WINDOW_S = 1.0
MIN_WINDOWS = 2  # in a row with preemptions, for each request that a worker sends away
MIN_REMAINING = 32  # tokens that a request may still generate; with fewer it is soon over
COPIED_PER_TOKEN = 64  # tokens whose KV is copied in about one decode step


@dataclass(frozen=True, slots=True)
class Running:
    """A request that can migrate."""

    ordinal: int  # order of arrival; unique
    num_tokens: int  # tokens whose KV would move
    remaining: int | None  # tokens that it may still generate; None: as many as fit


def drain_order(running: Iterable[Running]) -> list[Running]:
    """Sort the most urgent first: what may run longest is least likely to end in time by itself."""
    return sorted(running, key=lambda r: (r.remaining is not None, -(r.remaining or 0), r.ordinal))


def pays(request: Running) -> bool:
    """Return whether the rest of the request takes longer than its migration."""
    remaining = request.remaining
    return remaining is None or (
        remaining >= MIN_REMAINING and remaining * COPIED_PER_TOKEN >= request.num_tokens
    )


def relief_order(running: Iterable[Running]) -> list[Running]:
    """Sort by what a worker that lacks blocks sends away first: most blocks, then youngest."""
    worthwhile = [r for r in running if pays(r)]
    return sorted(worthwhile, key=lambda r: (-r.num_tokens, -r.ordinal))


class Pressure:
    """Tracks which workers have preempted in every recent window."""

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}  # preemptions, by boot
        self._windows: dict[bytes, int] = {}  # windows in a row with more of them, by boot
        self._next = 0.0

    def due(self, now: float) -> bool:
        """Return whether the next look is due."""
        return now >= self._next

    def look(self, preemptions: Mapping[bytes, int], now: float) -> list[bytes]:
        """Return the workers that should send a request away now. `preemptions`: by boot id."""
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
        """Return whether the worker did not preempt in the last window."""
        return not self._windows.get(boot)
