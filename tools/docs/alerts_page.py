"""Print k8s/observability/compose/alerts.yml, generated from the PrometheusRule.

`make docs` writes the file, tests/test_docs.py compares it.
"""

from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).parents[2] / "k8s/observability/alerts.yaml"
HEAD = "# `make docs` writes this file from ../alerts.yaml.\n"


def groups() -> list[dict[str, Any]]:
    """The groups of the PrometheusRule."""
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["spec"]["groups"]
    return found


def rules() -> dict[str, dict[str, Any]]:
    """Alerts of the PrometheusRule by name."""
    return {rule["alert"]: rule for group in groups() for rule in group["rules"]}


def page() -> str:
    """The rules in the file format of Prometheus."""
    return HEAD + yaml.safe_dump({"groups": groups()}, sort_keys=False, width=1000)


if __name__ == "__main__":
    print(page(), end="")
