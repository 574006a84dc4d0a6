"""Straight lines through costs against sizes, and their plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Point = tuple[float, float]
FEWEST = 4  # points: each from the third on is compared with those before it
PANEL, HEIGHT, TOP, LEFT, BOTTOM, GAP = 230, 200, 70, 60, 46, 60


@dataclass(frozen=True)
class Line:
    """y = fixed + slope * x by least squares, and the deviations of single points, as shares of the
    largest y."""

    fixed: float
    slope: float
    r2: float
    above: float  # the maximum height of a point above the line through all points before it
    below: float  # the maximum depth of a point below any point before it


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


def svg(series: Mapping[str, Mapping[str, Any]], subtitle: str) -> str:
    """An SVG with a panel per series: `points` with x, core and carried, and `line` or None. A
    hollow point is one that the machine did not carry; it is not part of the line."""
    width = LEFT + len(series) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{TOP + HEIGHT + BOTTOM}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="10" y="20" font-size="15">What one router costs, in % of a core</text>',
        f'<text x="10" y="38" fill="#666">{escape(subtitle)}</text>',
    ]
    for number, (name, one) in enumerate(series.items()):
        parts += _panel(LEFT + number * (PANEL + GAP), name, one)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: int, name: str, series: Mapping[str, Any]) -> list[str]:
    points = series["points"]
    most_x = max(p["x"] for p in points)
    most_y = max(0.01, 1.1 * max(p["core"] for p in points))
    bottom = TOP + HEIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        return left + PANEL * x / most_x, bottom - HEIGHT * min(max(y, 0.0), most_y) / most_y

    parts = [
        f'<text x="{left}" y="{TOP - 10}">{escape(name)}</text>',
        f'<path d="M{left} {TOP}V{bottom}H{left + PANEL}" fill="none" stroke="#999"/>',
    ]
    for part in range(5):
        share = most_y * part / 4
        _, y = place(0, share)
        parts.append(
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * share:.3g}</text>'
        )
    if line := series["line"]:
        (x1, y1), (x2, y2) = (
            place(x, line["fixed"] + line["slope"] * x) for x in (points[0]["x"], most_x)
        )
        parts.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#36c"/>')
        text = f"R² {line['r2']:.3f}"
        parts.append(f'<text x="{left + 8}" y="{TOP + 8}" fill="#36c">{text}</text>')
    for point in points:
        x, y = place(point["x"], point["core"])
        fill = "#2a7" if point["carried"] else "white"
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="#2a7"/>',
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{point["x"]:g}</text>',
        ]
    return parts
