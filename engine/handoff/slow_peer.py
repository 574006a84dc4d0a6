"""Decides when decode gives up a prefill that has become slow. Pure: time is an argument.

A prefill that sends Progress but no KV is neither silent nor frozen. It may compute shorter prompts
first, or share its cores with others. What it has sent stays at decode as a cached prefix, so going
on elsewhere costs the missing chunks only.
"""

from dataclasses import dataclass, replace

SLOW_RATIO = 2.0  # a prefill is slow after this many times its longest chunk so far
# But never sooner than this: prefill computes shorter prompts before a long one, and comes back to
# it, since the time it waits raises its priority (engine/scheduling/scheduler.py).
SLOW_S = 2.0
LOOK_S = 0.5  # if `look` was not called for longer than this, decode was slow: that does not count


@dataclass(frozen=True, slots=True)
class SlowPeerDetector:
    """How fast the chunks of one prefill come; times are clock readings in seconds."""

    chunk_at: float  # when the last chunk was complete; at first when the blocks were granted
    moved: float  # when a frame last arrived
    looked: float  # when `look` was last called
    longest: float | None = None  # seconds of the longest chunk; None before the first

    @classmethod
    def begin(cls, now: float) -> "SlowPeerDetector":
        """The detector of a prefill whose blocks are granted now."""
        return cls(chunk_at=now, moved=now, looked=now)

    def arrived(self, now: float, chunk: bool) -> "SlowPeerDetector":
        """Frames were verified; `chunk` if they complete a chunk in all layers."""
        if not chunk:
            return replace(self, moved=now)
        longest = max(self.longest or 0.0, now - self.chunk_at)
        return replace(self, moved=now, chunk_at=now, longest=longest)

    def look(self, now: float) -> "SlowPeerDetector":
        """To be called several times a second, before `slow`."""
        lost = max(0.0, now - self.looked - LOOK_S)
        return replace(self, looked=now, moved=min(now, self.moved + lost))

    def slow(self, now: float) -> bool:
        """Whether nothing has come for more than twice the time of the longest chunk."""
        if self.longest is None:
            return False
        return now - self.moved > max(SLOW_S, SLOW_RATIO * self.longest)
