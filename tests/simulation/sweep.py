"""Many runs over all cells of the fault matrix, on every core.

    python -m simulation.sweep --runs 10000 --first 0 [--cores 2]

(with PYTHONPATH=tests; `make simulate ARGS="--runs N --first SEED"`). Seeds count up from the
first; a seed strikes the cell of its number modulo the cells, so every cell gets its share, and
each tenth run strikes a second time somewhere else. The last line is a JSON object; the exit code
is 0 if the oracle has no objection and every cell that can be hit was. The shortest form of the
first failing scenarios is written to build/simulation/, for `python -m simulation.run --scenario`.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from simulation.faults import KINDS, cells, unreachable
from simulation.phases import PHASES
from simulation.run import make, simulate
from simulation.scenario import Fault, Scenario
from simulation.shrink import shrunk

SECOND = 10  # every so many runs have a second fault
MAX_SHRUNK = 3
FAILURES = Path("build/simulation")


@dataclass
class Tally:
    """What a part of the runs has shown."""

    runs: int = 0
    seconds: float = 0.0  # of one core
    simulated_s: float = 0.0
    callbacks: int = 0
    retries: int = 0
    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, str, str, list[str]]] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.runs += other.runs
        self.seconds += other.seconds
        self.simulated_s += other.simulated_s
        self.callbacks += other.callbacks
        self.retries += other.retries
        self.hits += other.hits
        self.answers += other.answers
        self.failed += other.failed


def planned(seed: int) -> tuple[str, str]:
    """The cell that a seed strikes."""
    known = cells()
    return known[seed % len(known)]


def scenario_of(seed: int) -> Scenario:
    """What a seed runs."""
    kind, phase = planned(seed)
    scenario = make(seed, kind, phase)
    if seed % SECOND == SECOND - 1 and kind != "deadline":
        rng = Random(f"second {seed}")
        kind, phase = rng.choice([cell for cell in cells() if cell[0] != "deadline"])
        second = Fault(kind, phase, rng.choice([a.name for a in scenario.asks]), 0, seed)
        scenario = replace(scenario, faults=(*scenario.faults, second))
    return scenario


def run_seeds(seeds: range) -> Tally:
    """One core's part of a sweep."""
    tally = Tally()
    began = time.perf_counter()
    for seed in seeds:
        result = simulate(scenario_of(seed))
        tally.runs += 1
        tally.simulated_s += result.simulated_s
        tally.callbacks += result.callbacks
        tally.retries += result.retries
        tally.hits.update(result.hits)
        tally.answers.update(result.answers.values())
        if result.violations:
            tally.failed.append((seed, *planned(seed), result.violations))
    tally.seconds = time.perf_counter() - began
    return tally


def sweep(first: int, runs: int, cores: int) -> Tally:
    """Runs seeds first .. first + runs - 1."""
    seeds = range(first, first + runs)
    total = Tally()
    if cores == 1:
        return run_seeds(seeds)
    size = 50
    parts = [seeds[at : at + size] for at in range(0, runs, size)]
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        for tally in pool.imap(run_seeds, parts):
            total.add(tally)
    return total


def table(tally: Tally) -> str:
    """Hits per cell; a dash where a cell cannot be hit."""
    width = max(len(kind) for kind in KINDS)
    lines = [" " * width + "".join(f"{phase:>14}" for phase in PHASES)]
    for kind in KINDS:
        row = "".join(
            f"{'-' if unreachable(kind, phase) else tally.hits[kind, phase]:>14}"
            for phase in PHASES
        )
        lines.append(f"{kind:<{width}}{row}")
    return "\n".join(lines)


def reasons() -> str:
    """Why cells cannot be hit."""
    found: dict[str, list[str]] = {}
    for kind in KINDS:
        for phase in PHASES:
            if why := unreachable(kind, phase):
                found.setdefault(why, []).append(f"{kind}/{phase}")
    return "\n".join(f"- {why}: {', '.join(names)}" for why, names in found.items())


def figures(tally: Tally, first: int, wall_s: float) -> dict[str, object]:
    known = cells()
    return {
        "ok": not tally.failed and all(tally.hits[cell] for cell in known),
        "runs": tally.runs,
        "seeds": [first, first + tally.runs - 1],
        "violations": len(tally.failed),
        "cells": len(known),
        "cells_hit": sum(bool(tally.hits[cell]) for cell in known),
        "least_hits": min(tally.hits[cell] for cell in known),
        "missed": [f"{kind}/{phase}" for kind, phase in known if not tally.hits[kind, phase]],
        "unreachable": len(KINDS) * len(PHASES) - len(known),
        "hits": tally.hits.total(),
        "answers": dict(sorted(tally.answers.items())),
        "retries": tally.retries,
        "simulated_hours": round(tally.simulated_s / 3600, 2),
        "callbacks": tally.callbacks,
        "wall_s": round(wall_s, 1),
        "runs_per_s": round(tally.runs / wall_s, 1),
    }


def write_failures(tally: Tally) -> None:
    FAILURES.mkdir(parents=True, exist_ok=True)
    for number, (seed, kind, phase, found) in enumerate(tally.failed):
        print(f"seed {seed} ({kind}, {phase}): {'; '.join(found)[:400]}")
        if number < MAX_SHRUNK:
            path = FAILURES / f"{seed}.json"
            path.write_text(shrunk(scenario_of(seed)).to_json() + "\n")
            print(f"  its shortest form: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    began = time.perf_counter()
    tally = sweep(args.first, args.runs, args.cores)
    wall_s = time.perf_counter() - began
    print(table(tally))
    print("Cells that cannot be hit:")
    print(reasons())
    write_failures(tally)
    result = figures(tally, args.first, wall_s)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
