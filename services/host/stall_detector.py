"""Whether an engine is frozen, judged by looks at its counter. Pure, time is an argument.

A look that finds the counter moved, or no work, begins anew. Both time and a number of looks must
pass: after a pause of its own process (SIGSTOP, a suspended machine) the one who looks has seen
nothing, however late it is, and what the other has said meanwhile comes in order.
"""

from dataclasses import dataclass

FROZEN_S = 8.0  # so that it is found within 10 s, with the time that a step may take by itself
MIN_LOOKS = 16  # a living engine moves once a second: eleven looks at ten a second


@dataclass(slots=True)
class StallDetector:
    """The counter of one engine, as far as it was seen."""

    counter: int = -1
    since: float = 0.0  # when it last moved, or had no work
    looks: int = 0  # since then

    def look(self, counter: int, busy: bool, now: float) -> bool:
        """Whether the engine is frozen."""
        if counter != self.counter or not busy:
            self.counter, self.since, self.looks = counter, now, 0
            return False
        self.looks += 1
        return self.looks >= MIN_LOOKS and now - self.since >= FROZEN_S
