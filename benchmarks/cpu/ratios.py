"""Ratios of interleaved runs and the bounds of the table: pure functions of seconds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Minimum, median and maximum of some values."""

    least: float
    median: float
    greatest: float

    def as_json(self) -> dict[str, float]:
        return {"min": digits(self.least), "median": digits(self.median),
                "max": digits(self.greatest)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound of a ratio: a lower one, or an upper one where less is better."""

    minimum: float
    aim: float

    @property
    def less_is_better(self) -> bool:
        return self.aim < self.minimum

    def held_by(self, ratio: float) -> bool:
        return ratio <= self.minimum if self.less_is_better else ratio >= self.minimum

    def aim_reached_by(self, ratio: float) -> bool:
        return ratio <= self.aim if self.less_is_better else ratio >= self.aim


def digits(value: float) -> float:
    """The value rounded to four significant digits."""
    return float(f"{value:.4g}")


def spread(values: Sequence[float]) -> Spread:
    """The spread of values. Raises ValueError if there are none."""
    if not values:
        raise ValueError("no values")
    return Spread(min(values), statistics.median(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratios of pdserve to the peer per pair: both of a pair were measured within the same
    minute.

    Raises ValueError if the lengths differ or a value is not positive.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} runs of ours, {len(theirs)} of theirs")
    if any(value <= 0 for value in (*ours, *theirs)):
        raise ValueError("a figure is not positive")
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def judged(bound: Bound, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, object]:
    """One row of the table: the bound, the ratio's spread and the medians of both sides."""
    found = spread(ratios(ours, theirs))
    return {
        "minimum": bound.minimum,
        "aim": bound.aim,
        "ratio": found.as_json(),
        "ours": digits(statistics.median(ours)),
        "theirs": digits(statistics.median(theirs)),
        "pairs": len(ours),
        "ok": bound.held_by(found.median),
        "aim_reached": bound.aim_reached_by(found.median),
    }


def medians(table: Mapping[str, Mapping[str, object]]) -> dict[str, float]:
    """Median ratio by row: the last line of the harness."""
    found = {}
    for name, row in table.items():
        ratio = row["ratio"]
        assert isinstance(ratio, dict)
        found[name] = float(ratio["median"])
    return found
