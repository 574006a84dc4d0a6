"""Ratios of interleaved runs: pure functions of their figures."""

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


def compared(
    ours: Sequence[float], theirs: Sequence[float], less_is_better: bool = False
) -> dict[str, object]:
    """One row of the table: the ratio's spread and the medians of both sides."""
    return {
        "less_is_better": less_is_better,
        "ratio": spread(ratios(ours, theirs)).as_json(),
        "ours": digits(statistics.median(ours)),
        "theirs": digits(statistics.median(theirs)),
        "pairs": len(ours),
    }


def medians(table: Mapping[str, Mapping[str, object]]) -> dict[str, float]:
    """Median ratio by row: the last line of the harness."""
    found = {}
    for name, row in table.items():
        ratio = row["ratio"]
        assert isinstance(ratio, dict)
        found[name] = float(ratio["median"])
    return found
