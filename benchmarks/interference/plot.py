"""The result as an SVG: the share of gaps between tokens that exceed each length, and a table.

Both axes of the curves are logarithmic, so that the tail, where interference shows, has as much
room as the rest.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from interference.figures import percentile

LEFT, RIGHT, TOP, WIDTH, HEIGHT, ROW = 70, 20, 60, 860, 320, 20
LEAST_S, MOST_S = 0.001, 10.0
LEAST_SHARE = 1e-5
COLOURS = ("#2a7", "#c63", "#36c", "#939", "#777", "#b80")
COLUMNS = ("p50", "p99", "max", "TTFT p50 long", "short", "tokens", "goodput /s", "in flight")


def place_x(seconds: float) -> float:
    bounded = min(max(seconds, LEAST_S), MOST_S)
    share = math.log(bounded / LEAST_S) / math.log(MOST_S / LEAST_S)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def place_y(share: float) -> float:
    bounded = min(max(share, LEAST_SHARE), 1.0)
    return TOP + HEIGHT * math.log(bounded) / math.log(LEAST_SHARE)


def curve(gaps: Sequence[float]) -> str:
    """Path data: the share of gaps longer than x."""
    steps = [10 ** (-k / 12) for k in range(61)]
    ordered = sorted(gaps)
    points = [(percentile(ordered, 1 - share), share) for share in steps if share < 1]
    marks = [f"{place_x(at):.1f} {place_y(share):.1f}" for at, share in points]
    return "M" + "L".join(marks)


def cells(run: Mapping[str, Any]) -> list[str]:
    """A row of the table; times in ms."""
    itl, ttft = run["itl_ms"], run["ttft_ms"]
    times = [itl["p50"], itl["p99"], itl["max"], ttft["long"]["p50"], ttft["short"]["p50"]]
    rest = [run["completed_tokens"], run["goodput_requests_s"], run["short_in_flight"]]
    return [f"{value:.0f}" for value in times] + [f"{value:g}" for value in rest]


def axes() -> list[str]:
    bottom = TOP + HEIGHT
    parts: list[str] = []
    for at in (0.001, 0.01, 0.1, 1.0, 10.0):
        x = place_x(at)
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#ddd"/>')
        label = f"{1000 * at:g} ms" if at < 1 else f"{at:g} s"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    for share in (1.0, 0.1, 0.01, 0.001, 1e-4, 1e-5):
        y, colour = place_y(share), "#c00" if share == 0.01 else "#ddd"
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{colour}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.3%}</text>')
    return parts


def svg(report: Mapping[str, Any], gaps: Mapping[str, Sequence[float]]) -> str:
    """The whole document; `gaps`: seconds between tokens, by configuration."""
    runs = report["runs"]
    table = TOP + HEIGHT + 50
    height = table + ROW * (len(runs) + 1) + 10
    found, rates = report["comparison"], report["rates"]
    title = (
        f"Gaps between tokens: one prefill and one decode worker against two mixed ones; "
        f"p99 {found['p99_itl_ratio']:g} times lower than {found['best_mixed']}"
    )
    subtitle = (
        f"{report['machine']}, two cores, {report['seconds']:.0f} s; "
        f"{rates['long_rate']:.3f} long and {rates['short_rate']:.2f} short requests a second; "
        "share of gaps that are longer"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="15">{escape(title)}</text>',
        f'<text x="10" y="40" fill="#666">{escape(subtitle)}</text>',
        *axes(),
    ]
    edges = [220 + 85 * n for n in range(len(COLUMNS))]
    parts += [
        f'<text x="{x}" y="{table}" text-anchor="end" fill="#666">{escape(name)}</text>'
        for x, name in zip(edges, COLUMNS, strict=True)
    ]
    for number, (name, run) in enumerate(runs.items()):
        colour = COLOURS[number % len(COLOURS)]
        y = table + ROW * (number + 1)
        parts.append(
            f'<path d="{curve(gaps[name])}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(f'<path d="M10 {y - 4}h20" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="36" y="{y}">{escape(name)}</text>')
        parts += [
            f'<text x="{x}" y="{y}" text-anchor="end">{cell}</text>'
            for x, cell in zip(edges, cells(run), strict=True)
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
