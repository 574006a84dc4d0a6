"""Detects a frozen engine by its step counter. Pure.

An engine is frozen if it has work but its counter has not moved for FROZEN_S and for MIN_LOOKS
observations. The time alone is not enough: if the watching process itself was paused (SIGSTOP, a
suspended machine), much time passes without an observation.
"""

from dataclasses import dataclass

FROZEN_S = 8.0  # detects a freeze within 10 s, including the time of a step
MIN_LOOKS = 16  # 1.6 to 7 s of heartbeats; the counter of a living engine moves once a second


@dataclass(slots=True)
class StallDetector:
    """Decides from successive observations of an engine's step counter whether the engine is
    frozen."""

    counter: int = -1
    since: float = 0.0  # when the counter last moved, or there was no work
    looks: int = 0  # looks since then

    def look(self, counter: int, busy: bool, now: float) -> bool:
        """Record an observation: the engine's step counter, whether it has work (`busy`), and the
        time. Returns whether the engine is frozen."""
        if counter != self.counter or not busy:
            self.counter, self.since, self.looks = counter, now, 0
            return False
        self.looks += 1
        return self.looks >= MIN_LOOKS and now - self.since >= FROZEN_S
