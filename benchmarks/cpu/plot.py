"""The table as an SVG: one bar per row with its whole spread.

Bars are the ratio on a logarithmic axis (for rows where less is better, its inverse), so that more
is better in every row.
"""

import math
from collections.abc import Mapping
from html import escape
from typing import Any

LEFT, RIGHT, TOP, STEP, WIDTH = 230, 110, 50, 26, 820
LEAST, MOST = 0.5, 50.0


def place(times: float) -> float:
    """The x of a ratio, clamped to the axis."""
    bounded = min(max(times, LEAST), MOST)
    share = math.log(bounded / LEAST) / math.log(MOST / LEAST)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def times_better(row: Mapping[str, Any], ratio: float) -> float:
    """The ratio, inverted in rows where less is better."""
    return 1 / ratio if row["less_is_better"] else ratio


def svg(rows: Mapping[str, Mapping[str, Any]], subtitle: str) -> str:
    """The whole document."""
    height = TOP + STEP * len(rows) + 40
    bottom = height - 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="10" y="20" font-size="15">pdserve over its peers</text>',
        f'<text x="10" y="38" fill="#666">{escape(subtitle)}; bars: median, lines: min to max'
        "</text>",
    ]
    for at in (0.5, 1, 2, 5, 10, 20, 50):
        x, colour = place(at), "#c00" if at == 1 else "#ddd"
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{colour}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{at:g}x</text>')
    one = place(1)
    for number, (name, row) in enumerate(rows.items()):
        y = TOP + STEP * number + 5
        ratio = row["ratio"]
        median = place(times_better(row, ratio["median"]))
        ends = sorted(place(times_better(row, ratio[end])) for end in ("min", "max"))
        colour = "#2a7" if times_better(row, ratio["median"]) >= 1 else "#c63"
        middle = y + 8
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{min(median, one):.1f}" y="{y}" width="{abs(median - one):.1f}" '
            f'height="16" fill="{colour}"/>',
            f'<path d="M{ends[0]:.1f} {middle}H{ends[1]:.1f}" stroke="black"/>',
            f'<text x="{WIDTH - RIGHT + 8}" y="{y + 12}">{ratio["median"]:.3g}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
