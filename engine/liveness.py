"""The sign of life of an engine's thread: a counter that a hung thread cannot move. Pure.

Every turn of the thread moves it. A turn that computes may take long: then it moves once a second
for as long as such a step may take, which is a multiple of what is expected of it. So a chunk of a
minute on a slow machine is life, and a step that hangs is not, once it had its time.
"""

MOVES_S = 1.0  # at least so often a living thread moves the counter while work is queued
SLACK = 10.0  # times the expected time of a step, which other load or long contexts may stretch


class LivenessCounter:
    """Beaten by the engine's thread, read by any; what is read never falls."""

    def __init__(self) -> None:
        self._last = (0, 0.0, 0.0)  # count, since when, for how long it moves by itself

    def beat(self, now: float, expected_s: float = 0.0) -> None:
        """A turn began, or a step that should take `expected_s`."""
        self._last = (self.read(now) + 1, now, SLACK * expected_s)

    def read(self, now: float) -> int:
        """The counter."""
        count, since, moving_s = self._last
        return count + int(max(0.0, min(now - since, moving_s)) / MOVES_S)
