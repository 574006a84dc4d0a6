"""The picker's own metrics."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class PickerMetrics:
    """A collector."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._decisions = Counter(
            "pdserve_picker_decisions",
            "Requests by the reason for their endpoint, or for having none",
            ("reason",),
            registry=registry,
        )
        self._seconds = Histogram(
            "pdserve_picker_decision_seconds",
            "Seconds from a request's body to its endpoint",
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._elsewhere = Counter(
            "pdserve_picker_served_elsewhere",
            "Requests answered by an endpoint other than the first choice",
            registry=registry,
        )
        self._failures = Counter(
            "pdserve_picker_failures",
            "Proxy streams that failed because of an internal error of the picker",
            registry=registry,
        )

    def decided(self, reason: str, seconds: float | None) -> None:
        """Count a request that got an endpoint after `seconds`, or none (None)."""
        self._decisions.labels(reason).inc()
        if seconds is not None:
            self._seconds.observe(seconds)

    def served_elsewhere(self) -> None:
        self._elsewhere.inc()

    def failed(self) -> None:
        self._failures.inc()

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()
