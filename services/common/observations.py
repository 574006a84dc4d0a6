"""A histogram as Prometheus needs it: counts observed values by upper bound. Does not import
Prometheus' library, since few processes need it. Pure.
"""

from bisect import bisect_left
from collections.abc import Sequence


class Observations:
    """A histogram: counts values by upper bound. One thread may change it; any thread may read
    it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value: count it in the first bucket whose upper bound is not below the value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it) for each bucket, as prometheus_client
        takes them."""
        cumulative, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            cumulative += count
            buckets.append((bound, float(cumulative)))
        return buckets
