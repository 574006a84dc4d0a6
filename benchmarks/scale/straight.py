"""A straight line through points, and whether they bend upwards from it."""

from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]
MOST_BEND = 1.3  # the last slope to the first


@dataclass(frozen=True)
class Line:
    """y = fixed + slope * x."""

    fixed: float
    slope: float
    r2: float
    bend: float  # the slope between the last two points to that between the first two

    @property
    def straight(self) -> bool:
        """Whether more of x never costs more than in proportion."""
        return self.bend <= MOST_BEND


def fit(points: Sequence[Point]) -> Line:
    """Least squares; `points` in order of x. Raises ValueError for fewer than three."""
    if len(points) < 3:
        raise ValueError(f"a line through {len(points)} points says nothing")
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    fixed = mean_y - slope * mean_x
    left = sum((y - fixed - slope * x) ** 2 for x, y in points)
    total = sum((y - mean_y) ** 2 for _, y in points)
    r2 = 1 - left / total if total else 1.0
    first, last = _slope(*points[:2]), _slope(*points[-2:])
    bend = last / first if first > 0 else 0.0 if last <= 0 else float("inf")
    return Line(fixed, slope, r2, bend)


def _slope(one: Point, other: Point) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
