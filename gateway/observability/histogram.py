"""Prometheus histograms, by the label model_name, of what is observed with every token.

An observation in prometheus_client's own takes two locks, which is a tenth of what a token costs.
Ours has no series with the time of its creation.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client import Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Observer(Protocol):
    """Takes what is observed of one model."""

    def observe(self, value: float, times: int) -> None:
        """A value within a bucket's bound, or equal to it, is in that bucket."""


class TokenHistogram(Protocol):
    def of(self, model: str) -> Observer: ...


class _Observations:
    """The counts of one model. Only the loop's thread changes them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times


class MemoryHistogram(Collector):
    """Kept in memory, for a gateway that is one process."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(map(float, bounds))
        self._models: dict[str, _Observations] = {}

    def of(self, model: str) -> Observer:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _Observations(self._bounds)
        return found

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        for model, seen in list(self._models.items()):
            below, buckets = 0, []
            for bound, count in zip((*map(str, self._bounds), "+Inf"), seen.counts, strict=True):
                below += count
                buckets.append((bound, float(below)))
            family.add_metric((model,), buckets, seen.total)
        yield family


class FileHistogram:
    """Of several processes, whose figures prometheus_client keeps in files."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram

    def of(self, model: str) -> Observer:
        return _InFile(self._histogram.labels(model))


class _InFile:
    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram

    def observe(self, value: float, times: int) -> None:
        for _ in range(times):
            self._histogram.observe(value)
