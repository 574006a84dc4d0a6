"""The HTML report of `pdserve bench`: one page with its plots as SVG, which loads no other file."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pdserve.cli.bench_tables import COLUMNS, TIMES, sweep_rows
from pdserve.cli.load import Sample, output_rates

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 260, 64, 16, 28, 40
COLOURS = ("#2a9d6f", "#c8553d")
BINS = 40
SLOTS = 80  # points of the line over time
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}table{border-collapse:collapse;margin:1rem 0}"
    "td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto;margin:.5rem 0}"
)
Points = Sequence[tuple[float, float]]
Series = Mapping[str, Points]


def page(title: str, runs: Sequence[Mapping[str, Any]], samples: Sequence[Sample]) -> str:
    """Return the report of one run, or of a sweep if there are several. `samples`: the requests of
    the only run."""
    if len(runs) > 1:
        tables = [_table(sweep_rows(runs))]
        plots = [
            _lines("output tokens per second", "requests per second", {
                "output tokens/s": [(r["rate"], r["output_tokens_per_s"]) for r in runs],
            }),
            *(
                _lines(f"{TIMES[key]}, ms", "requests per second", {
                    p: [(r["rate"], r[key][p]) for r in runs] for p in ("p50", "p99")
                })
                for key in ("ttft_ms", "itl_ms")
            ),
        ]  # fmt: skip
    else:
        (run,) = runs
        rows = [["milliseconds", *COLUMNS]]
        rows += [[name, *(f"{run[key][c]:.1f}" for c in COLUMNS)] for key, name in TIMES.items()]
        facts = [
            ["requests answered", f"{run['completed']} of {run['requests']}"],
            ["seconds", f"{run['duration_s']:.1f}"],
            ["requests per second", f"{run['requests_per_s']:.2f}"],
            ["output tokens per second", f"{run['output_tokens_per_s']:.1f}"],
        ]
        tables = [_table(facts), _table(rows)]
        good = [sample for sample in samples if not sample.error]
        plots = [
            _histogram("time to first token, ms", [1000 * s.ttft_s for s in good]),
            _histogram("between two tokens, ms", [1000 * g for s in good for g in s.gaps_s]),
            _lines("output tokens per second", "seconds", {"": output_rates(good, SLOTS)}),
        ]
    body = "\n".join([f"<h1>pdserve bench</h1><p>{escape(title)}</p>", *tables, *plots])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>pdserve bench</title><style>{STYLE}</style></head>\n<body>{body}</body></html>\n"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _lines(title: str, x_title: str, series: Series) -> str:
    """Draw lines from zero, each with a mark at each point if there are few."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    x_max, y_max = (_ceiling(max(values)) for values in zip(*points, strict=True))
    parts = []
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(_x(x / x_max), _y(y / y_max)) for x, y in line]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(places) < BINS:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places
            ]
        at = LEFT + 12 + 90 * number
        if len(series) > 1:
            parts.append(f'<text x="{at}" y="{TOP + 12}" fill="{colour}">{escape(name)}</text>')
    return _plot(title, x_title, x_max, y_max, parts)


def _histogram(title: str, values: Sequence[float]) -> str:
    """Draw how many values lie in each of BINS equal ranges up to the 99th percentile, the last of
    which has the larger values, too."""
    if not values:
        return ""
    ordered = sorted(values)
    x_max = _ceiling(ordered[math.ceil((len(ordered) - 1) * 0.99)])
    counts = [0] * BINS
    for value in ordered:
        counts[min(BINS - 1, int(value / x_max * BINS))] += 1
    y_max = _ceiling(max(counts))
    width = (WIDTH - LEFT - RIGHT) / BINS
    bars = [
        f'<rect x="{_x(n / BINS):.1f}" y="{_y(count / y_max):.1f}" width="{width - 1:.1f}" '
        f'height="{_y(0) - _y(count / y_max):.1f}" fill="{COLOURS[0]}"/>'
        for n, count in enumerate(counts)
    ]
    return _plot(title, "milliseconds; the last bar has longer ones, too", x_max, y_max, bars)


def _plot(title: str, x_title: str, x_max: float, y_max: float, parts: Sequence[str]) -> str:
    axes = []
    for step in range(5):
        share = step / 4
        axes.append(f'<path d="M{LEFT} {_y(share):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        axes.append(
            f'<text x="{LEFT - 6}" y="{_y(share) + 4:.1f}" text-anchor="end">'
            f"{share * y_max:g}</text>"
        )
        axes.append(
            f'<text x="{_x(share):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{share * x_max:g}</text>"
        )
    return "\n".join([
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-size="12" font-family="system-ui, sans-serif">',
        f'<text x="{LEFT}" y="16" font-weight="bold">{escape(title)}</text>',
        *axes,
        *parts,
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle" fill="#666">'
        f"{escape(x_title)}</text></svg>",
    ])  # fmt: skip


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _ceiling(value: float) -> float:
    """Return the least round number that is not below a value: 1, 2, 4, 6, 8 or 10 times a power
    of ten; 1 for values that are not positive."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 4, 6, 8, 10, 20) if factor * power >= value)
