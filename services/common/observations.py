"""Counts observations by upper bound, as a Prometheus histogram needs them. Pure, and independent
of Prometheus' library, since few processes need to import it."""

from bisect import bisect_left
from collections.abc import Sequence


class Observations:
    """A histogram. One thread changes it; any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value in the first bucket whose bound is at least the value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as prometheus_client takes them."""
        cumulative, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            cumulative += count
            buckets.append((bound, float(cumulative)))
        return buckets
