"""The histogram of tokens produces the same text as that of prometheus_client."""

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from pdserve.gateway.metrics.metrics import MemoryHistogram

BOUNDS = (0.001, 0.5, 2)
VALUES = [(0.0005, 1), (0.001, 3), (0.3, 2), (2.0, 1), (99.0, 4)]


def page(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@pytest.mark.parametrize("models", [[], ["a"], ["a", 'b"\n']])
def test_its_output_equals_that_of_the_library(models: list[str]) -> None:
    registry, reference = CollectorRegistry(), CollectorRegistry()
    mine = MemoryHistogram("gap_seconds", "Between two.", BOUNDS)
    registry.register(mine)
    other = Histogram(
        "gap_seconds", "Between two.", ("model_name",), registry=reference, buckets=BOUNDS
    )
    for n, model in enumerate(models, 1):
        seen, same = mine.of(model), other.labels(model)
        for value, times in VALUES:
            seen.observe(value, times * n)
            for _ in range(times * n):
                same.observe(value)
    assert page(registry) == page(reference)
    assert len(page(registry)) == 2 + 6 * len(models)
