"""A straight line through points, and whether they lie on it or below its end."""

from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]
MOST_BEND = 1.3  # the last slope to the first
MOST_OFF = 0.1  # of the largest y: so far may a point be from the line, or a flat one rise


@dataclass(frozen=True)
class Line:
    """y = fixed + slope * x."""

    fixed: float
    slope: float
    r2: float
    bend: float  # the slope between the last two points to that between the first two
    rise: float  # from the lowest point to the highest, as a share of the largest y
    off: float  # how far the farthest point is from the line, as a share of the largest y

    @property
    def straight(self) -> bool:
        """Whether the points are near the line, and more of x costs no more than in proportion."""
        return self.rise <= MOST_OFF or (self.bend <= MOST_BEND and self.off <= MOST_OFF)


def fit(points: Sequence[Point]) -> Line:
    """Least squares; `points` in order of x. Raises ValueError for fewer than three."""
    if len(points) < 3:
        raise ValueError(f"a line through {len(points)} points says nothing")
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    fixed = mean_y - slope * mean_x
    residuals = [y - fixed - slope * x for x, y in points]
    left = sum(residual**2 for residual in residuals)
    total = sum((y - mean_y) ** 2 for _, y in points)
    r2 = 1 - left / total if total else 1.0
    first, last = _slope(*points[:2]), _slope(*points[-2:])
    bend = last / first if first > 0 else 0.0 if last <= 0 else float("inf")
    ys = [y for _, y in points]
    largest = max(map(abs, ys)) or 1.0
    off, rise = max(map(abs, residuals)) / largest, (max(ys) - min(ys)) / largest
    return Line(fixed, slope, r2, bend, rise, off)


def _slope(one: Point, other: Point) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
