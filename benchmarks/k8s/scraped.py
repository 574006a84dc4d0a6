"""A Prometheus in virtual time: samples of scrapes, and the queries of the scalers.

It supports only the PromQL that these need (metrics with matchers, sum, max and min and arithmetic
of them, `or vector(0)`, avg_over_time of a subquery, comparisons with `bool`), and refuses anything
else.
"""

import math
import operator
import re
from collections.abc import Iterable
from typing import Any

import promql_parser
from prometheus_client.core import Metric

LOOKBACK_S = 300.0  # a sample is valid for this long, unless its target has gone
Labels = tuple[tuple[str, str], ...]
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATIONS = {"sum": sum, "max": max, "min": min}


class Scraped:
    """Series by name and labels; `seen` is called once per scrape."""

    def __init__(self) -> None:
        self._series: dict[str, dict[Labels, list[tuple[float, float]]]] = {}
        self._newest: set[tuple[str, Labels]] = set()

    def seen(self, targets: Iterable[tuple[str, Iterable[Metric]]], now: float) -> None:
        """Record a scrape of all targets: the name of a pod, and its metrics. Series without a
        target end here."""
        found: set[tuple[str, Labels]] = set()
        for pod, metrics in targets:
            for sample in (s for metric in metrics for s in metric.samples):
                labels = tuple(sorted({**sample.labels, "pod": pod}.items()))
                found.add((sample.name, labels))
                points = self._series.setdefault(sample.name, {}).setdefault(labels, [])
                points.append((now, float(sample.value)))
        for name, labels in self._newest - found:
            self._series[name][labels].append((now, math.nan))
        self._newest = found

    def ask(self, query: str, now: float) -> float | None:
        """The value of a query with one result; None without a result."""
        found = self._value(promql_parser.parse(query), now)
        if len(found) > 1:
            raise ValueError(f"{query} gives {len(found)} series")
        return next(iter(found.values()), None)

    def _value(self, node: Any, now: float) -> dict[Labels, float]:
        match node:
            case promql_parser.ParenExpr():
                return self._value(node.expr, now)
            case promql_parser.VectorSelector():
                return self._instant(node, now)
            case promql_parser.AggregateExpr() if node.modifier is None:
                values = self._value(node.expr, now).values()
                return {(): OPERATIONS[str(node.op)](values)} if values else {}
            case promql_parser.Call() if node.func.name == "avg_over_time":
                return self._average(node.args[0], now)
            case promql_parser.Call() if node.func.name == "vector":
                return {(): float(node.args[0].val)}
            case promql_parser.BinaryExpr() if str(node.op) == "or":
                left = self._value(node.lhs, now)
                if left.keys() - {()}:
                    raise ValueError(f"{node.lhs} has labels")
                return left or self._value(node.rhs, now)
            case promql_parser.BinaryExpr() if str(node.op) == ">" and node.modifier.return_bool:
                bound = node.rhs.val
                return {k: float(v > bound) for k, v in self._value(node.lhs, now).items()}
            case promql_parser.BinaryExpr() if str(node.op) in ARITHMETIC and not node.modifier:
                left, right = (self._value(side, now).get(()) for side in (node.lhs, node.rhs))
                if left is None or right is None:
                    return {}
                return {(): ARITHMETIC[str(node.op)](left, right)}
        raise ValueError(f"{node} is not known here")

    def _average(self, node: Any, now: float) -> dict[Labels, float]:
        step, span = node.step.total_seconds(), node.range.total_seconds()
        first = math.floor((now - span) / step) + 1
        sums: dict[Labels, list[float]] = {}
        for number in range(first, math.floor(now / step) + 1):
            for labels, value in self._value(node.expr, number * step).items():
                sums.setdefault(labels, []).append(value)
        return {labels: sum(values) / len(values) for labels, values in sums.items()}

    def _instant(self, node: Any, now: float) -> dict[Labels, float]:
        found = {}
        for labels, points in self._series.get(node.name, {}).items():
            if not all(_matches(m, dict(labels)) for m in node.matchers.matchers):
                continue
            value = next((v for at, v in reversed(points) if at <= now), math.nan)
            at = next((at for at, _ in reversed(points) if at <= now), -math.inf)
            if not math.isnan(value) and now - at <= LOOKBACK_S:
                found[labels] = value
        return found


def _matches(matcher: Any, labels: dict[str, str]) -> bool:
    value, kind = labels.get(matcher.name, ""), str(matcher.op)
    if kind.endswith("Equal"):
        return (value == matcher.value) is not kind.endswith("NotEqual")
    return (re.fullmatch(matcher.value, value) is not None) is not kind.endswith("NotRe")
