"""When a prefill that has become slow is given up. Pure: time is an argument.

A prefill that sends Progress but no KV is neither silent nor frozen: it may be set aside for
shorter prompts, or share its cores. What it has sent stays at decode as a cached prefix, so to go
on elsewhere costs the missing chunks only.
"""

from dataclasses import dataclass, replace

SLOW_RATIO = 2.0  # times the longest chunk so far
# But never sooner: prefill sets a long prompt aside for shorter ones, and takes it up again, since
# waiting counts in its favour (engine/scheduling/scheduler.py).
SLOW_S = 2.0
LOOK_S = 0.5  # whoever looks less often than this was slow itself: that time does not count


@dataclass(frozen=True, slots=True)
class SlowPeerDetector:
    """How fast the chunks of one prefill come; times are clock readings."""

    chunk_at: float  # when the last chunk was complete, at first when the blocks were granted
    moved: float  # when a frame last arrived
    looked: float
    longest: float | None = None  # seconds of a chunk; None: none is complete yet

    def arrived(self, now: float, chunk: bool) -> "SlowPeerDetector":
        """Frames were verified; `chunk`: with them a chunk is complete in all layers."""
        if not chunk:
            return replace(self, moved=now)
        longest = max(self.longest or 0.0, now - self.chunk_at)
        return replace(self, moved=now, chunk_at=now, longest=longest)

    def look(self, now: float) -> "SlowPeerDetector":
        """To be called several times a second, before `slow`."""
        lost = max(0.0, now - self.looked - LOOK_S)
        return replace(self, looked=now, moved=min(now, self.moved + lost))

    def slow(self, now: float) -> bool:
        """Nothing has come for more than twice the time of a chunk."""
        if self.longest is None:
            return False
        return now - self.moved > max(SLOW_S, SLOW_RATIO * self.longest)


def granted(now: float) -> SlowPeerDetector:
    """The pace of a prefill that may send from now on."""
    return SlowPeerDetector(chunk_at=now, moved=now, looked=now)
