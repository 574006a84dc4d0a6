"""The Helm chart in k8s/helm, rendered by Helm's Go library in a separate process."""

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

from builders.manifests import Manifest

CHART = Path(__file__).parents[3] / "k8s/helm"
RELEASE, NAMESPACE = "pdserve", "llm"
Values = dict[str, Any]


class Chart:
    """The chart; Helm's library stays in the process of `pool`."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def texts(self, values: Values | None = None, release: str = RELEASE) -> dict[str, str]:
        """Return what each template renders, by its file name. Raises ValueError if Helm refuses
        the values."""
        return self._pool.submit(_render, json.dumps(values or {}), release).result()

    def objects(self, values: Values | None = None, release: str = RELEASE) -> list[Manifest]:
        """Return the objects that Helm applies, those of hooks included."""
        texts = self.texts(values, release).items()
        yamls = [text for name, text in texts if name.endswith(".yaml")]
        return [m for text in yamls for m in yaml.safe_load_all(text) if m]

    def lint(self, values: Values | None = None) -> list[str]:
        """Return what `helm lint` reports, from warnings up."""
        return self._pool.submit(_lint, json.dumps(values or {})).result()


@contextmanager
def loaded_chart() -> Iterator[Chart]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield Chart(pool)


def is_hook(manifest: Manifest) -> bool:
    return "helm.sh/hook" in manifest["metadata"].get("annotations", {})


def _render(values: str, release: str) -> dict[str, str]:
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        try:
            found: dict[str, str] = chart.render(
                json.loads(values), name=release, namespace=NAMESPACE
            )
        except helm_python.HelmError as error:
            raise ValueError(str(error)) from None
    return {name.rpartition("/")[2]: text for name, text in found.items()}


def _lint(values: str) -> list[str]:
    import helm_python

    report = helm_python.lint(CHART, json.loads(values), strict=True)
    warning = 2
    said = [m["error"] for m in report["messages"] if m["severity"] >= warning]
    return [*said, *report["errors"]]
