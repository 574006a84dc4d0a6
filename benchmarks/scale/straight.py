"""A straight line through points, and whether they rise no faster than it."""

from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]
MOST = 0.1  # of the largest y
FEWEST = 4  # points: each from the third on is compared with those before it


@dataclass(frozen=True)
class Line:
    """y = fixed + slope * x by least squares, and how far single points are off, as shares of the
    largest y."""

    fixed: float
    slope: float
    r2: float
    above: float  # the most that a point lies above the line through all points before it
    below: float  # the most that a point lies below any point before it

    @property
    def straight(self) -> bool:
        """Whether more of x costs no more than in proportion, without a step; a discount is no
        fault, but a fall is."""
        return self.above <= MOST and self.below <= MOST


def fit(points: Sequence[Point]) -> Line:
    """`points` in order of x. Raises ValueError for fewer than FEWEST."""
    if len(points) < FEWEST:
        raise ValueError(f"a line through {len(points)} points says nothing")
    fixed, slope = least_squares(points)
    ys = [y for _, y in points]
    largest, mean = max(map(abs, ys)) or 1.0, sum(ys) / len(ys)
    left = sum((y - fixed - slope * x) ** 2 for x, y in points)
    total = sum((y - mean) ** 2 for y in ys)
    above = below = 0.0
    for at in range(2, len(points)):
        x, y = points[at]
        start, rise = least_squares(points[:at])
        above = max(above, y - start - rise * x)
    for at in range(1, len(points)):
        below = max(below, max(ys[:at]) - ys[at])
    r2 = 1 - left / total if total else 1.0
    return Line(fixed, slope, r2, above / largest, below / largest)


def least_squares(points: Sequence[Point]) -> tuple[float, float]:
    """Where the line begins, at x = 0, and its slope."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return mean_y - slope * mean_x, slope
