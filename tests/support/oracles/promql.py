"""The names and labels in PromQL, and the files that contain it: boards, alerts, scalers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alerts_page import rules

K8S = Path(__file__).parents[3] / "k8s"
BOARDS = sorted((K8S / "observability/boards").glob("*.json"))
NAME = re.compile(r"(?<![\w:$])(?:vllm:|pdserve_|process_)[a-z0-9_]+")
SELECTOR = re.compile(r"([a-z0-9_:]+)\{([^}]*)\}")
GROUP = re.compile(r"\b(?:by|on) \(([^)]*)\)")
SAMPLE = re.compile(r"_(total|bucket|sum|count)$")
OF_SCRAPES = {"job", "instance", "le"}


def panels(board: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(board.read_text())["panels"]
    return found


def expressions() -> dict[str, str]:
    """Return all deployed expressions, by their location."""
    found = {f"alert {name}": str(rule["expr"]) for name, rule in rules().items()}
    for board in BOARDS:
        for panel in panels(board):
            for target in panel.get("targets", ()):
                if "expr" in target:
                    where = f"{board.stem}: {panel['title']} {target['refId']}"
                    found[where] = target["expr"]
    return found


def names(text: str) -> set[str]:
    """Return the metrics in an expression, or in any text; those of rates and the like as
    sampled.
    """
    return {name for name in NAME.findall(text) if not name.endswith("_")}


def family(name: str, known: set[str]) -> str:
    """Return the metric of a sample."""
    return name if name in known else SAMPLE.sub("", name)


def labels(expression: str) -> Iterator[tuple[set[str], str]]:
    """Return (metrics, a label that one of them must have)."""
    for name, matchers in SELECTOR.findall(expression):
        if NAME.fullmatch(name):
            yield from (({name}, label) for label in re.findall(r"(\w+)\s*[=!]", matchers))
    for words in GROUP.findall(expression):
        named = (word.strip() for word in words.split(","))
        yield from ((names(expression), word) for word in named if word not in OF_SCRAPES)
