"""The table as an SVG: one bar per row with its whole spread, the minimum and the aim.

Bars are the ratio over its minimum on a logarithmic axis (for rows where less is better, the
minimum over the ratio), so that all rows share one threshold.
"""

import math
from collections.abc import Mapping
from html import escape
from typing import Any

LEFT, RIGHT, TOP, STEP, WIDTH = 230, 110, 50, 26, 820
LEAST, MOST = 0.1, 10.0


def place(relative: float) -> float:
    """The x of a ratio relative to its minimum, clamped to the axis."""
    bounded = min(max(relative, LEAST), MOST)
    share = math.log(bounded / LEAST) / math.log(MOST / LEAST)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def relative(row: Mapping[str, Any], ratio: float) -> float:
    """The ratio relative to the row's minimum: 1 is the minimum, more is better."""
    less_is_better = row["aim"] < row["minimum"]
    return float(row["minimum"] / ratio if less_is_better else ratio / row["minimum"])


def svg(rows: Mapping[str, Mapping[str, Any]], subtitle: str) -> str:
    """The whole document."""
    height = TOP + STEP * len(rows) + 40
    bottom = height - 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="10" y="20" font-size="15">pdserve over its peers, in units of the minimum</text>',
        f'<text x="10" y="38" fill="#666">{escape(subtitle)}; bars: median, lines: min to max, '
        "ticks: aim</text>",
    ]
    for at in (0.1, 0.2, 0.5, 1, 2, 5, 10):
        x, colour = place(at), "#c00" if at == 1 else "#ddd"
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{colour}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{at:g}x</text>')
    for number, (name, row) in enumerate(rows.items()):
        y = TOP + STEP * number + 5
        ratio = row["ratio"]
        median = place(relative(row, ratio["median"]))
        ends = sorted(place(relative(row, ratio[end])) for end in ("min", "max"))
        aim = place(relative(row, row["aim"]))
        colour = "#2a7" if row["ok"] else "#c63"
        middle = y + 8
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{median - LEFT:.1f}" height="16" fill="{colour}"/>',
            f'<path d="M{ends[0]:.1f} {middle}H{ends[1]:.1f}" stroke="black"/>',
            f'<path d="M{aim:.1f} {y}V{y + 16}" stroke="black" stroke-width="2"/>',
            f'<text x="{WIDTH - RIGHT + 8}" y="{y + 12}">{ratio["median"]:.3g} '
            f"(min. {row['minimum']:g})</text>",
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
