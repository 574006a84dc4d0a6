"""A Prometheus histogram for what is observed with every token: prometheus_client's takes a lock
for each of the two figures that an observation changes."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Observations:
    """Of one model; changed by one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """A value within a bucket's bound, or equal to it, is in that bucket."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times


class ModelHistogram(Collector):
    """By the label model_name."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(map(float, bounds))
        self._models: dict[str, Observations] = {}

    def of(self, model: str) -> Observations:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = Observations(self._bounds)
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
