"""A counter that shows whether an engine's thread is alive: a hung thread cannot move it. Pure.

Every turn of the thread moves the counter. During a step the counter also moves by itself once a
second, for a multiple of the time that the step should take. A chunk that takes a minute on a slow
machine therefore counts as alive; a step that hangs counts as dead after that time.
"""

MOVES_S = 1.0  # a live thread with work moves the counter at least this often
SLACK = 10.0  # times the expected time of a step: other load or long contexts may stretch it


class LivenessCounter:
    """Monotonic counter: the engine's thread calls `beat`, any thread calls `read`."""

    def __init__(self) -> None:
        self._last = (0, 0.0, 0.0)  # count, time of the beat, seconds it moves by itself

    def beat(self, now: float, expected_s: float = 0.0) -> None:
        """Record the start of a turn, or of a step that should take `expected_s` seconds."""
        self._last = (self.read(now) + 1, now, SLACK * expected_s)

    def read(self, now: float) -> int:
        """Return the counter's value."""
        count, since, moving_s = self._last
        return count + int(max(0.0, min(now - since, moving_s)) / MOVES_S)
