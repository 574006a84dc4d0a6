"""Cost against size as an SVG: points and their straight line, one panel per series.

A hollow point is one that the machine did not carry; it is not part of a line.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

PANEL, HEIGHT, TOP, LEFT, BOTTOM, GAP = 230, 200, 70, 60, 46, 60


def svg(series: Mapping[str, Mapping[str, Any]], subtitle: str) -> str:
    """The whole document. Each series has `points` with x, core and carried, and `line` or None."""
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
