"""The Helm chart, which files here share. Makes the scalers' simulation importable: it is a
benchmark, and its modules import each other by bare names."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from builders.chart import Chart, loaded_chart

sys.path.append(str(Path(__file__).parents[2] / "benchmarks/k8s"))
NO_HELM = "NO HELM: no package with Helm's library for this machine; the chart was not rendered"


@pytest.fixture(scope="session")
def chart() -> Iterator[Chart]:
    if find_spec("helm_python") is None:
        pytest.skip(NO_HELM)
    with loaded_chart() as loaded:
        yield loaded
