"""Prefill/decode interference: one prefill and one decode worker, a core each, against two mixed
ones.

`python benchmarks/interference/sweep.py [--seconds N] [--seed N] [--chunks N ...] [--rates LONG
SHORT]`: calibrates, runs every configuration on the same arrivals, and prints one JSON object.
The rate of short requests is right if the separated pair has eight of them in flight in its run,
within a quarter; otherwise, in a whole sweep, it is corrected and that run is repeated. Results for
the same source tree and options are reused (build/interference). A whole run takes about 75 minutes
and writes benchmarks/results/interference.json and interference.svg; others print only. Needs
benchmarks and tests/support in PYTHONPATH, as `make bench-interference` sets it.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu.machine import load, pin
from cpu.machine import name as name_of_machine
from interference.arrivals import LEAST_LONG, SHORT, Schedule, schedule
from interference.calibrate import Sharing, calibrate
from interference.configurations import CHUNKS, read_answers, run, write
from interference.figures import SEPARATED, comparison, gaps
from interference.plot import svg
from systems.sources import DIRTY, ROOT, commit, source_tree

SECONDS = 300.0
CALIBRATION_S = 60.0  # of each closed loop
IN_FLIGHT = 8
WITHIN = 1.25  # up to this factor more or less than eight is accepted
TRIES = 4
RESULTS = ROOT / "benchmarks/results"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def kept(path: Path, make: Any, clean: bool) -> dict[str, Any]:
    """The contents of the file, or a new result; changed sources are always measured again."""
    if clean and path.exists():
        say(f"{path.stem}: measured before")
    else:
        say(path.stem)
        write(path, make())
    return dict(json.loads(path.read_text()))


def brief(figures: dict[str, Any]) -> str:
    itl, ttft = figures["itl_ms"], figures["ttft_ms"]
    return (
        f"ITL {itl['p50']} p99 {itl['p99']} max {itl['max']} ms; TTFT mean "
        f"{ttft['long']['mean']} long, {ttft['short']['mean']} short; {figures['tokens_s']} tok/s;"
        f" {figures['short_in_flight']} in flight; cores {figures['cores_used']}"
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sweep, and the folder of its raw figures; `clean`: earlier ones may be reused."""

    seconds: float
    seed: int
    chunks: Sequence[int]
    folder: Path
    clean: bool

    @property
    def whole(self) -> bool:
        return self.seconds >= SECONDS

    def plan(self, long_rate: float, short_rate: float) -> Schedule:
        least = LEAST_LONG if self.whole else 0
        return schedule(long_rate, short_rate, self.seconds, least, self.seed)

    def made(self, name: str, long_rate: float, short_rate: float) -> dict[str, Any]:
        """One run of a configuration at these rates, or its earlier result."""
        path = self.folder / f"{name}-{long_rate:g}-{short_rate:g}.json"
        found = kept(path, lambda: run(name, self.plan(long_rate, short_rate)), self.clean)
        say(f"{name}: {brief(found['summary'])}")
        return found


def separated(wanted: Wanted) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the rates and those tried before; the run at them). Raises RuntimeError if no rate of short
    requests keeps eight in flight."""
    seconds = min(CALIBRATION_S, wanted.seconds)
    rates = kept(wanted.folder / "rates.json", lambda: calibrate(seconds), wanted.clean)
    say(f"rates: {rates}")
    long_rate = rates["long_rate"]
    lasts = wanted.plan(long_rate, 1.0).seconds
    sharing, tried = Sharing.of(rates["closed_loop"]), []

    def shorts(rate: float) -> list[float]:
        plan = wanted.plan(long_rate, rate)
        return [arrival.at_s for arrival in plan.arrivals if arrival.kind == SHORT]

    for _ in range(TRIES):
        rate = round(sharing.rate_for(IN_FLIGHT, shorts, lasts), 3)
        result = wanted.made(SEPARATED, long_rate, rate)
        there = result["summary"]["short_in_flight"]
        tried.append([rate, there])
        if not wanted.whole or 1 / WITHIN <= there / IN_FLIGHT <= WITHIN:
            return {**rates, "short_rate": rate, "tried": tried}, result
        sharing = sharing.seen(there, shorts(rate), lasts)
    text = f"no rate keeps {IN_FLIGHT} requests in flight: {tried}; remove {wanted.folder} to retry"
    raise RuntimeError(text)


def measure(wanted: Wanted, given: Sequence[float] | None) -> dict[str, Any]:
    """Measure; `given`: the rates of long and short requests, instead of calibrating them."""
    if given:
        rates: dict[str, Any] = dict(zip(("long_rate", "short_rate"), given, strict=True))
        result = wanted.made(SEPARATED, *given)
    else:
        rates, result = separated(wanted)
    say(f"rates: {rates}")
    both = rates["long_rate"], rates["short_rate"]
    names = [f"mixed-{chunk}" for chunk in wanted.chunks]
    results = {SEPARATED: result} | {name: wanted.made(name, *both) for name in names}
    runs = {name: found["summary"] for name, found in results.items()}
    report = {
        "commit": commit(),
        "machine": name_of_machine(),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(wanted.plan(*both).seconds, 1),
        "seed": wanted.seed,
        "rates": rates,
        "comparison": comparison(runs) if names else runs[SEPARATED],
        "runs": runs,
    }
    if wanted.whole and not given and set(wanted.chunks) == set(CHUNKS):
        between = {
            name: [gap for answer in read_answers(found) for gap in gaps(answer)]
            for name, found in results.items()
        }
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "interference.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / "interference.svg").write_text(svg(report, between))
    return {**report["comparison"], "rates": rates, "seconds": report["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--chunks", type=int, nargs="*", default=list(CHUNKS), choices=CHUNKS)
    parser.add_argument("--rates", type=float, nargs=2, help="long and short requests a second")
    args = parser.parse_args()
    cores = pin()
    revision = commit()
    say(f"load by others: {load(cores):.0%} of the cores {cores}")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    clean = not revision.endswith(DIRTY)
    tree = source_tree() + ("" if clean else DIRTY)
    folder = ROOT / "build/interference" / f"{tree}-{args.seconds:g}-{args.seed}"
    found = measure(Wanted(args.seconds, args.seed, args.chunks, folder, clean), args.rates)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
