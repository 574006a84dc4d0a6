"""Kill, stop and cut off real processes under 16 streams; no stream may lose a token.

`make chaos`. 200 prefill workers die between the first and the last frame of a hand-off, 100 decode
workers in mid-stream, the only router 20 times, each in rounds of one system; a round's rings are
checked by conformance at its end. A round that has passed on the same tree is not run again. About
20 minutes on two cores.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from systems.sources import DIRTY, commit, source_tree

from chaos.rounds import run_round

# (kind of rounds.ROUNDS, required hits, maximum hits per round)
WANTED = (
    ("stopped", 1, 1),
    ("twice", 2, 2),
    ("unresumed", 2, 1),
    ("network", 28, 1),
    ("router", 20, 10),
    ("decode", 100, 20),
    ("prefill", 200, 20),
)
MOST_DETECTION_S, MOST_BACK_S, MOST_UNRESUMED_S = 1.0, 3.0, 6.0
STORE = Path("build/chaos")


def percentiles(values: list[float]) -> dict[str, float]:
    """Percentiles of seconds; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    return {name: round(ordered[round(share * last)], 3) for name, share in at.items()}


def bad(found: dict[str, Any]) -> list[str]:
    """The violations of a round, in words."""
    late = [
        f"{name} {max(found[name]):.2f} s"
        for name, most in (
            ("detection_s", MOST_DETECTION_S),
            ("blocks_back_s", MOST_BACK_S),
            ("unresumed_s", MOST_UNRESUMED_S),
        )
        if found[name] and max(found[name]) >= most
    ]
    counted = [f"{n} {found[n]}" for n in ("crashed_twice", "computed_again") if found[n]]
    return [*found["wrong"], *found["violations"], *late, *counted]


def run(kind: str, count: int, number: int, store: Path) -> dict[str, Any]:
    """A round's outcome, from the store if it has passed before. A failed one is kept
    separately."""
    path = store / f"{kind}-{count}-{number}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    found = run_round(kind, count)
    wrong = bad(found)
    (path.with_suffix(".failed") if wrong else path).write_text(json.dumps(found))
    what = f"{found['hits']} hits, {found['missed']} missed, {found['streams']} streams"
    print(f"{kind} {number}: {what}, {found['seconds']:.0f} s", file=sys.stderr, flush=True)
    for text in [*wrong, *found["other_losses"]][:20]:
        print(f"  {text[:400]}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="of rounds; all when none is given")
    parser.add_argument("--share", type=float, default=1.0, help="of the hits; 0.1: a tenth")
    args = parser.parse_args()
    began = time.monotonic()
    dirty = commit().endswith(DIRTY)
    store = STORE / (f"dirty-{time.time_ns()}" if dirty else source_tree())
    store.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"ok": True, "share": args.share}
    rounds: list[dict[str, Any]] = []
    for kind, wanted, most in WANTED:
        if args.kinds and kind not in args.kinds:
            continue
        wanted = max(1, round(wanted * args.share)) if wanted > most else wanted
        hits = number = 0
        while hits < wanted and number < 3 * wanted / most + 3 and figures["ok"]:
            count = min(most, wanted - hits)
            rounds.append(run(kind, count, number, store))
            figures["ok"] = not bad(rounds[-1])
            hits, number = hits + rounds[-1]["hits"], number + 1
        figures[kind] = hits
        figures["ok"] &= hits >= wanted

    def every(name: str) -> list[Any]:
        return [value for found in rounds for value in found[name]]

    cells = {cell: hits for found in rounds for cell, hits in found["cells"].items()}
    figures |= {
        "streams": sum(found["streams"] for found in rounds),
        "wrong": len(every("wrong")),
        "crashed_twice": sum(found["crashed_twice"] for found in rounds),
        "computed_again_after_router_kills": sum(found["computed_again"] for found in rounds),
        "adopted": sum(found["adopted"] for found in rounds),
        "other_losses": len(every("other_losses")),
        "violations": len(every("violations")),
        "detection_s": percentiles(every("detection_s")),
        "blocks_back_s": percentiles(every("blocks_back_s")),
        "unresumed_s": percentiles(every("unresumed_s")),
        "worker_start_s": percentiles(every("start_s")),
        "network_cells": f"{sum(map(bool, cells.values()))} of {len(cells)}",
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
