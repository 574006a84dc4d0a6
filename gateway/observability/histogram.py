"""Prometheus histograms, by the label model_name, of what is observed with every token.

An observation in prometheus_client's own takes two locks, which is a tenth of what a token costs.
Ours has no series with the time of its creation.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client import Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.services.host.metrics.observations import Observations


class Observer(Protocol):
    """Takes what is observed of one model."""

    def observe(self, value: float, times: int) -> None:
        """A value within a bucket's bound, or equal to it, is in that bucket."""


class TokenHistogram(Protocol):
    def of(self, model: str) -> Observer: ...


class MemoryHistogram(Collector):
    """Kept in memory, for a gateway that is one process."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._models: dict[str, Observations] = {}  # which the loop's thread changes

    def of(self, model: str) -> Observer:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = Observations(self._bounds)
        return found

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        for model, seen in list(self._models.items()):
            family.add_metric((model,), seen.buckets(), seen.total)
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
