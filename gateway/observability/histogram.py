"""Prometheus histograms with the label model_name, for values observed with every token.

prometheus_client's Histogram takes two locks per observation, a tenth of the cost of a token. These
histograms export no `_created` series.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client import Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.services.host.metrics.observations import Observations


class Observer(Protocol):
    """Records the observations of one model."""

    def observe(self, value: float, times: int) -> None:
        """Record a value `times` times; a bucket includes its upper bound."""


class TokenHistogram(Protocol):
    def of(self, model: str) -> Observer: ...


class MemoryHistogram(Collector):
    """A histogram in memory, for a gateway of one process."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._models: dict[str, Observations] = {}  # only the event loop's thread changes it

    def of(self, model: str) -> Observer:
        observations = self._models.get(model)
        if observations is None:
            observations = self._models[model] = Observations(self._bounds)
        return observations

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        for model, observations in list(self._models.items()):
            family.add_metric((model,), observations.buckets(), observations.total)
        yield family


class FileHistogram:
    """A histogram of several processes, which prometheus_client keeps in files."""

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
