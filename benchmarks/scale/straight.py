"""A straight line through points, and whether they rise no faster than it."""

from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]
MOST = 0.1  # of the largest y
FEWEST = 4  # points: each from the third on is compared with those before it


@dataclass(frozen=True)
class Line:
    """y = fixed + slope * x by least squares, and the deviations of single points, as shares of the
    largest y."""

    fixed: float
    slope: float
    r2: float
    above: float  # the maximum height of a point above the line through all points before it
    below: float  # the maximum depth of a point below any point before it

    @property
    def straight(self) -> bool:
        """Whether the cost grows at most in proportion to x, without a step; slower growth is fine,
        but a fall is not."""
        return self.above <= MOST and self.below <= MOST


def fit(points: Sequence[Point]) -> Line:
    """Fit `points` in order of x. Raises ValueError for fewer than FEWEST."""
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
    """The intercept of the line at x = 0, and its slope."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return mean_y - slope * mean_x, slope
