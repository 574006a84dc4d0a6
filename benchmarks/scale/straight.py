"""A straight line through points, and whether they rise no faster than it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Point = tuple[float, float]
MOST_BEND = 1.3
MOST_OFF = 0.06
FLAT = 0.1  # a smaller rise is none


@dataclass(frozen=True)
class Line:
    """y = fixed + slope * x, and the parabola through the same points: noise moves a slope between
    two neighbours by more than there is to see."""

    fixed: float
    slope: float
    r2: float
    bend: float  # the parabola's slope at the last point to that at the first
    rise: float  # from the lowest point to the highest, as a share of the largest y
    off: float  # how far the farthest point is from the parabola, likewise

    @property
    def straight(self) -> bool:
        """Whether more of x costs no more than in proportion, and without a step; a discount is no
        fault."""
        return self.rise <= FLAT or (self.bend <= MOST_BEND and self.off <= MOST_OFF)


def fit(points: Sequence[Point]) -> Line:
    """Least squares; `points` in order of x. Raises ValueError for fewer than three."""
    if len(points) < 3:
        raise ValueError(f"a line through {len(points)} points says nothing")
    x, y = (np.array(one, dtype=float) for one in zip(*points, strict=True))
    line, parabola = np.polyfit(x, y, 1), np.polyfit(x, y, 2)
    slope, fixed = line
    total = ((y - y.mean()) ** 2).sum()
    r2 = 1 - ((y - np.polyval(line, x)) ** 2).sum() / total if total else 1.0
    first, last = np.polyval(np.polyder(parabola), x[[0, -1]])
    bend = last / first if first > 0 else 0.0 if last <= 0 else float("inf")
    largest = abs(y).max() or 1.0
    off = abs(y - np.polyval(parabola, x)).max() / largest
    rise = (y.max() - y.min()) / largest
    return Line(*(float(one) for one in (fixed, slope, r2, bend, rise, off)))
