"""Detects a frozen engine by its step counter. Pure.

An engine is frozen if its counter has not moved for FROZEN_S and MIN_LOOKS observations although it
has work. A time alone is not enough: if the watching process itself was paused (SIGSTOP, a
suspended machine), much time passes without an observation.
"""

from dataclasses import dataclass

FROZEN_S = 8.0  # detects a freeze within 10 s, including the time of a step
MIN_LOOKS = 16  # 1.6 to 7 s of heartbeats; the counter of a living engine moves once a second


@dataclass(slots=True)
class StallDetector:
    """Observations of an engine's step counter."""

    counter: int = -1
    since: float = 0.0  # when the counter last moved, or there was no work
    looks: int = 0  # looks since then

    def look(self, counter: int, busy: bool, now: float) -> bool:
        """Record the counter, whether the engine has work (`busy`), and the time. Returns whether
        the engine is frozen."""
        if counter != self.counter or not busy:
            self.counter, self.since, self.looks = counter, now, 0
            return False
        self.looks += 1
        return self.looks >= MIN_LOOKS and now - self.since >= FROZEN_S
