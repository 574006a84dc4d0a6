"""Decides when decode gives up a prefill that has become slow. Pure: time is an argument.

A prefill that sends Progress but no KV is neither silent nor frozen. Its machine may be slow, or
share its cores with others. Time in which its engine computes other prompts first does not count:
it says so in Progress, and comes back, since tenants take turns; within its tenant it waits for
prompts of a lower priority value, and the longer it waits the sooner it passes those of its own.
What it has sent stays at decode as a cached prefix, so going on elsewhere costs the missing chunks
only.
"""

from dataclasses import dataclass, replace

SLOW_RATIO = 2.0  # a prefill is slow after this many times its longest chunk so far
SLOW_S = 2.0  # but never sooner than this
LOOK_S = 0.5  # if `look` was not called for longer than this, decode was slow: that does not count


@dataclass(frozen=True, slots=True)
class SlowPeerDetector:
    """How fast the chunks of one prefill come; times are clock readings in seconds."""

    # Both grow by time that does not count.
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

    def look(self, now: float, passed_over: bool = False) -> "SlowPeerDetector":
        """To be called several times a second, before `slow`. `passed_over`: prefill computes other
        prompts, so the time since the last look does not count."""
        lost = now - self.looked - (0.0 if passed_over else LOOK_S)
        lost = max(0.0, lost)
        chunk_at, moved = min(now, self.chunk_at + lost), min(now, self.moved + lost)
        return replace(self, looked=now, chunk_at=chunk_at, moved=moved)

    def slow(self, now: float) -> bool:
        """Whether nothing has come for more than twice the time of the longest chunk."""
        if self.longest is None:
            return False
        return now - self.moved > max(SLOW_S, SLOW_RATIO * self.longest)
