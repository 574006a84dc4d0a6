"""Line 8: separation pays. One prefill and one decode worker, a core each, against two mixed ones.

`python benchmarks/handoff/line8_interference.py [--seconds N] [--seed N] [--chunks N ...]
[--rates LONG SHORT]`: calibrates, runs every configuration on the same arrivals, and prints one
JSON object. What has been measured on the same source tree with the same options is not measured
again (build/interference). A whole run takes about an hour and writes
benchmarks/results/interference.json and interference.svg; others print only.
Wants benchmarks and tests/support in PYTHONPATH, as `make bench-interference` has it.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from accept import ROOT, commit, source_tree
from cpu.machine import load, name, pin
from interference.arrivals import LEAST_LONG, Schedule, schedule
from interference.calibrate import calibrate
from interference.configurations import CHUNKS, read_answers, run, write
from interference.figures import SEPARATED, gaps, verdict
from interference.plot import svg

SECONDS = 300.0
CALIBRATION_S = 60.0  # of each closed loop
RESULTS = ROOT / "benchmarks/results"


def told(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def kept(path: Path, make: Any, clean: bool) -> dict[str, Any]:
    """What is in the file, or was just made; changed sources are always measured anew."""
    if clean and path.exists():
        told(f"{path.stem}: measured before")
    else:
        told(path.stem)
        write(path, make())
    return dict(json.loads(path.read_text()))


def brief(figures: dict[str, Any]) -> str:
    itl, ttft = figures["itl_ms"], figures["ttft_ms"]
    return (
        f"ITL {itl['p50']} p99 {itl['p99']} max {itl['max']} ms; TTFT mean "
        f"{ttft['long']['mean']} long, {ttft['short']['mean']} short; {figures['tokens_s']} tok/s;"
        f" {figures['short_in_flight']} in flight; cores {figures['cores_used']}"
    )


def measure(args: argparse.Namespace, folder: Path, clean: bool) -> dict[str, Any]:
    if args.rates:
        rates = dict(zip(("long_rate", "short_rate"), args.rates, strict=True))
    else:
        seconds = min(CALIBRATION_S, args.seconds)
        rates = kept(folder / "rates.json", lambda: calibrate(seconds), clean)
    told(f"rates: {rates}")
    whole = args.seconds >= SECONDS
    plan: Schedule = schedule(
        rates["long_rate"],
        rates["short_rate"],
        args.seconds,
        LEAST_LONG if whole else 0,
        args.seed,
    )
    runs: dict[str, Any] = {}
    between: dict[str, list[float]] = {}
    for configuration in [SEPARATED, *(f"mixed-{chunk}" for chunk in args.chunks)]:
        path = folder / f"{configuration}.json"
        result = kept(path, lambda configuration=configuration: run(configuration, plan), clean)
        runs[configuration] = result["summary"]
        between[configuration] = [gap for a in read_answers(result) for gap in gaps(a)]
        told(f"{configuration}: {brief(result['summary'])}")
    found = verdict(runs) if len(runs) > 1 else {"ok": False, **runs[SEPARATED]}
    report = {
        "commit": commit(),
        "machine": name(),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(plan.seconds, 1),
        "seed": args.seed,
        "rates": rates,
        "verdict": found,
        "runs": runs,
    }
    if whole and set(args.chunks) == set(CHUNKS):
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "interference.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / "interference.svg").write_text(svg(report, between))
    return {**found, "rates": rates, "seconds": report["seconds"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--chunks", type=int, nargs="*", default=list(CHUNKS), choices=CHUNKS)
    parser.add_argument("--rates", type=float, nargs=2, help="long and short requests a second")
    args = parser.parse_args()
    cores = pin()
    revision = commit()
    told(f"load by others: {load(cores):.0%} of the cores {cores}")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = ROOT / "build/interference" / f"{source_tree()}-{args.seconds:g}-{args.seed}"
    found = measure(args, folder, clean=not revision.endswith("-dirty"))
    print(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
