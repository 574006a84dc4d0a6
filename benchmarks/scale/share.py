"""The cost of one of ten routers at its share of 100 workers and 20,000 streams of 10
tokens per second, and its growth with workers, streams and gateways.

Two cores do not carry the whole system, so one router is real, among fakes that speak the whole
protocol: all 100 workers, which report on the streams of all ten routers, and a tenth of the
streams, from ten gateways. Its cost is the processor time of its process, and each shape is
measured in several tries, minutes apart. The lines along workers and streams end at the share,
beyond which two cores do not carry the fakes. A point whose streams do not reach their token rate,
twice in a row, is no point of a line. `whole` is a smaller system with real gateways, over HTTP.
Arguments: names of parts, all by default. Writes scale.json and scale.svg next to the other results
if all parts were run. Needs benchmarks, benchmarks/cpu and tests/support in PYTHONPATH.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import machine
from scale import one_router, whole
from scale.lines import FEWEST, fit, svg
from scale.shape import Shape

RESULTS = Path(__file__).parents[1] / "results"
WINDOW_S = 12.0
IDLE_WINDOW_S = 20.0
CARRIED = 0.97  # of the tokens that the streams demand
SHARE = Shape()
IDLE = replace(SHARE, streams=0)
IDLE_WORKERS, WORKERS = (25, 50, 100, 200), (25, 50, 75, 100)
STREAMS, GATEWAYS = (500, 1_000, 1_500, 2_000), (1, 5, 10, 20)
FEW_STREAMS = replace(SHARE, streams=1_000)  # of the points along workers and gateways
LINES = {  # by size
    "idle_workers": {n: replace(IDLE, workers=n) for n in IDLE_WORKERS},
    "workers": {n: replace(FEW_STREAMS, workers=n) for n in WORKERS},
    "streams": {n: replace(SHARE, streams=n) for n in STREAMS},
    "gateways": {n: replace(FEW_STREAMS, gateways=n) for n in GATEWAYS},
}
TRIES = 3  # of the share, of idle workers, and of a point of a line
SATURATED = 0.9  # of a core: above this, the router itself may be the bottleneck

measured: dict[tuple[Shape, int], dict[str, Any]] = {}  # by shape and try
not_carried: list[dict[str, Any]] = []  # by the machine, and therefore measured again


def point(shape: Shape, number: int = 0) -> dict[str, Any]:
    """Figures of one router; each try is measured once, or twice if it was exact and the machine
    did not carry its streams. A failed try has no `core` and no other figures."""
    if (shape, number) not in measured:
        found = _measure(shape)
        is_short = found["exact"] and found.get("carried", 1.0) < CARRIED
        if is_short and found["core"] < SATURATED:
            not_carried.append(found)
            found = _measure(shape)
        measured[shape, number] = found
    return measured[shape, number]


def measure_all() -> None:
    """Measure every shape once, then each of them again: tries of one shape are minutes apart."""
    shapes = [SHARE, IDLE, *(shape for line in LINES.values() for shape in line.values())]
    for number in range(TRIES):
        for shape in shapes:
            point(shape, number)


def _measure(shape: Shape) -> dict[str, Any]:
    window_s = WINDOW_S if shape.streams else IDLE_WINDOW_S
    try:
        found = one_router.measure(shape, window_s)
    except (one_router.Late, TimeoutError) as late:
        found = {"shape": asdict(shape), "carried": 0.0, "exact": False, "late": str(late)}
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def share() -> dict[str, Any]:
    """The router at its whole share."""
    tries = [point(SHARE, number) for number in range(TRIES)]
    placing = [one.get("placing_cpu_ms", {}).get("mean") for one in tries]
    return lowest(tries) | {"placing_cpu_tries_ms": placing}


def lowest(tries: list[dict[str, Any]]) -> dict[str, Any]:
    """The try with the lowest processor time, since other load on the machine can only raise it,
    with the times of all."""
    least = min(tries, key=lambda one: one.get("core", math.inf))
    return least | {"tries": [one.get("core") for one in tries]}


def idle() -> dict[str, Any]:
    """100 workers without work."""
    return lowest([point(IDLE, number) for number in range(TRIES)])


def index() -> dict[str, Any]:
    """Resident memory per hash: the router's growth when the workers join with their hashes, minus
    its growth when they join with none."""
    points = [point(shape) for shape in (IDLE, replace(IDLE, hashes=0))]
    if not all(found["exact"] for found in points):
        return {"points": points}
    grown = [found["joined_mib"] for found in points]
    num_bytes = (grown[0] - grown[1]) * (1 << 20) / (IDLE.workers * IDLE.hashes)
    return {
        "bytes_a_hash": round(num_bytes, 1),
        "mib_a_worker_without": round(grown[1] / IDLE.workers, 3),
    }


def along(line: dict[int, Shape]) -> dict[str, Any]:
    """The cost at each size, and the line through those of which every try was carried and
    exact."""
    points = []
    for size, shape in line.items():
        found = [point(shape, number) for number in range(TRIES)]
        least = lowest(found)
        points.append(
            {
                "x": size,
                "core": least.get("core", 0.0),
                "tries": least["tries"],
                "carried": all(f["exact"] and f.get("carried", 1.0) >= CARRIED for f in found),
                "placing_cpu_ms": least.get("placing_cpu_ms", {}).get("mean"),
            }
        )
    kept = [(p["x"], p["core"]) for p in points if p["carried"]]
    fitted = fit(kept) if len(kept) >= FEWEST else None
    return {
        "points": points,
        "line": None if fitted is None else {k: round(v, 6) for k, v in asdict(fitted).items()},
    }


def small_system() -> dict[str, Any]:
    return whole.measure(whole.Whole())


TITLES = {
    "idle_workers": "idle workers",
    "workers": f"workers, {FEW_STREAMS.streams:,} streams",
    "streams": f"streams, {SHARE.workers} workers",
    "gateways": f"gateways, {FEW_STREAMS.streams:,} streams",
}
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "share": share,
    "idle": idle,
    "index": index,
    **{name: partial(along, line) for name, line in LINES.items()},
    "whole": small_system,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    args = parser.parse_args()
    cores = machine.two_cores()
    load = machine.load(cores)
    complete = not args.parts
    if complete:
        measure_all()
    found = {name: PARTS[name]() for name in args.parts or PARTS}
    report = {
        "machine": f"{machine.name()}, {len(cores)} cores",
        "load_by_others": round(load, 3),
        "measured_again": not_carried,
        **found,
    }
    if complete:
        series = {title: found[name] for name, title in TITLES.items()}
        (RESULTS / "scale.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / "scale.svg").write_text(svg(series, report["machine"]))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
