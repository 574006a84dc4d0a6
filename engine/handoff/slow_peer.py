"""Decides when decode aborts the hand-off of a prefill worker that has become slow. Pure: time is
an argument.

A prefill worker that sends Progress but no KV is neither silent nor frozen: its machine may be
slow, or share its cores. Time in which its engine computes other prompts first does not count. The
worker reports that time in Progress, and it ends: tenants take turns, and within a tenant a prompt
waits for prompts of a lower priority value, and the longer it waits, the sooner it passes those of
an equal value. Blocks that have arrived stay at decode as a cached prefix, so a retry elsewhere
costs only the missing chunks.
"""

from dataclasses import dataclass, replace

SLOW_RATIO = 2.0  # slow: more than this many times the longest chunk so far
SLOW_S = 2.0  # and longer than this
LOOK_S = 0.5  # a longer gap between two `look` calls means that decode was slow, and does not count


@dataclass(frozen=True, slots=True)
class SlowPeerDetector:
    """Tracks how fast the chunks of one prefill arrive; times are clock readings in seconds."""

    # Time that does not count is added to `chunk_at` and `moved`.
    chunk_at: float  # when the last chunk was complete; at first, when the blocks were granted
    moved: float  # when a frame last arrived
    looked: float  # when `look` was last called
    longest: float | None = None  # seconds of the longest chunk; None before the first

    @classmethod
    def begin(cls, now: float) -> "SlowPeerDetector":
        """Return the detector of a prefill whose blocks are granted at `now`."""
        return cls(chunk_at=now, moved=now, looked=now)

    def arrived(self, now: float, chunk: bool) -> "SlowPeerDetector":
        """Record that frames were verified; `chunk` is true if they complete a chunk in all
        layers."""
        if not chunk:
            return replace(self, moved=now)
        longest = max(self.longest or 0.0, now - self.chunk_at)
        return replace(self, moved=now, chunk_at=now, longest=longest)

    def look(self, now: float, passed_over: bool = False) -> "SlowPeerDetector":
        """Discount time that does not count; call it several times a second, before `slow`.

        `passed_over`: prefill computes other prompts, so the time since the last look does not
        count.
        """
        discounted = now - self.looked - (0.0 if passed_over else LOOK_S)
        discounted = max(0.0, discounted)
        chunk_at, moved = min(now, self.chunk_at + discounted), min(now, self.moved + discounted)
        return replace(self, looked=now, chunk_at=chunk_at, moved=moved)

    def slow(self, now: float) -> bool:
        """Return whether nothing has arrived for more than max(SLOW_S, SLOW_RATIO * the longest
        chunk)."""
        if self.longest is None:
            return False
        return now - self.moved > max(SLOW_S, SLOW_RATIO * self.longest)
