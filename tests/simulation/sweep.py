"""Simulate many runs over all cells of the fault matrix, on every core.

    python -m simulation.sweep --runs 10000 [--first SEED] [--jobs 2] [--resume]

(with PYTHONPATH=tests; `make simulate ARGS="--runs N --first SEED"`). Seeds count up from the first
one. If it is not given, it is drawn at random and printed. A seed strikes the cell with its number
modulo the number of cells, so every cell gets its share; every tenth run has a second fault
elsewhere. The last line of output is a JSON object. The exit code is 0 if the oracle found no
violation and every reachable cell was hit. The shortest form of the first failing scenarios is
written to build/simulation/, for `python -m simulation.run --scenario`.

Seeds run in slices, and the result of each slice is kept in build/simulation/. With --resume, a
slice that has a result from the same sources is not run again.
"""

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from simulation.faults import KINDS, cells, unreachable
from simulation.phases import PHASES
from simulation.run import make, simulate
from simulation.scenario import Fault, Scenario
from simulation.shrink import shrunk

SECOND = 10  # every tenth run has a second fault
MAX_SHRUNK = 3
SLICE = 100  # runs
COLLECT = 20  # runs between two garbage collections
DRAWN = range(1_000_000, 1 << 40)  # range of random first seeds
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "simulation"
SOURCES = ("engine", "gateway", "kernels", "protos", "services", "tests/simulation")


@dataclass
class Tally:
    """Results of a part of the runs."""

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

    def to_json(self) -> str:
        return json.dumps(vars(self) | {"hits": [[*cell, n] for cell, n in self.hits.items()]})

    @classmethod
    def from_json(cls, text: str) -> "Tally":
        data: dict[str, Any] = json.loads(text)
        data["hits"] = Counter({(kind, phase): n for kind, phase, n in data["hits"]})
        data["answers"] = Counter(data["answers"])
        data["failed"] = [tuple(failed) for failed in data["failed"]]
        return cls(**data)


def planned(seed: int) -> tuple[str, str]:
    """Return the cell that a seed strikes."""
    known = cells()
    return known[seed % len(known)]


def scenario_of(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    kind, phase = planned(seed)
    scenario = make(seed, kind, phase)
    if seed % SECOND == SECOND - 1 and kind != "deadline":
        rng = Random(f"second {seed}")
        kind, phase = rng.choice([cell for cell in cells() if cell[0] != "deadline"])
        second = Fault(kind, phase, rng.choice([a.name for a in scenario.asks]), 0, seed)
        scenario = replace(scenario, faults=(*scenario.faults, second))
    return scenario


def run_seeds(seeds: range) -> Tally:
    """Run one core's part of a sweep."""
    tally = Tally()
    began = time.perf_counter()
    with _collected_seldom() as collect:
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
            if tally.runs % COLLECT == 0:
                collect()
    tally.seconds = time.perf_counter() - began
    return tally


@contextmanager
def _collected_seldom() -> Iterator[Callable[[], int]]:
    """Yield a function that collects garbage, with automatic collection disabled: a run makes many
    objects and keeps few."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def sweep(seeds: range, jobs: int) -> Tally:
    """Run these seeds and return their tally."""
    return _run_slices(_slices(seeds, -(-len(seeds) // jobs)), jobs, lambda part, tally: None)


def _slices(seeds: range, most: int = SLICE) -> list[range]:
    return [seeds[at : at + most] for at in range(0, len(seeds), most)]


def _run_slices(parts: list[range], jobs: int, done: Callable[[range, Tally], None]) -> Tally:
    """Run the slices and call `done` with each slice and its result."""
    total = Tally()

    def add(part: range, tally: Tally) -> None:
        done(part, tally)
        total.add(tally)

    if jobs == 1:
        for part in parts:
            add(part, run_seeds(part))
        return total
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for part, tally in zip(parts, pool.imap(run_seeds, parts), strict=True):
            add(part, tally)
    return total


def _sources() -> str:
    """Return a digest of everything in this repository that a run depends on."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".proto", ".cpp", ".h", ".inl"):
                digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def table(tally: Tally) -> str:
    """Return a table of hits per cell, with a dash where a cell cannot be hit."""
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
    """Return the reasons why cells cannot be hit."""
    found: dict[str, list[str]] = {}
    for kind in KINDS:
        for phase in PHASES:
            if why := unreachable(kind, phase):
                found.setdefault(why, []).append(f"{kind}/{phase}")
    return "\n".join(f"- {why}: {', '.join(names)}" for why, names in found.items())


def figures(tally: Tally, first: int, resumed: int, wall_s: float) -> dict[str, object]:
    """Return the figures of a sweep. `resumed` of the runs have earlier results; the others took
    `wall_s`."""
    known = cells()
    return {
        "ok": not tally.failed and all(tally.hits[cell] for cell in known),
        "runs": tally.runs,
        "seeds": [first, first + tally.runs - 1],
        "resumed": resumed,
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
        "runs_per_s": round((tally.runs - resumed) / wall_s, 1),
        "hits_per_cell": {f"{kind}/{phase}": tally.hits[kind, phase] for kind, phase in known},
    }


def write_failures(tally: Tally) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    for number, (seed, kind, phase, found) in enumerate(tally.failed):
        print(f"seed {seed} ({kind}, {phase}): {'; '.join(found)[:400]}")
        if number < MAX_SHRUNK:
            path = RESULTS / f"{seed}.json"
            path.write_text(shrunk(scenario_of(seed)).to_json() + "\n")
            print(f"  its shortest form: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--first", type=int, help="first seed; drawn if it is not given")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--resume", action="store_true", help="skip slices that were run before")
    args = parser.parse_args()
    first = SystemRandom().choice(DRAWN) if args.first is None else args.first
    print(f"seeds from {first} on; again: --runs {args.runs} --first {first}", flush=True)
    kept = RESULTS / _sources()
    kept.mkdir(parents=True, exist_ok=True)
    tally, missing = Tally(), []
    for part in _slices(range(first, first + args.runs)):
        path = _result_of(kept, part)
        if args.resume and path.exists():
            tally.add(Tally.from_json(path.read_text()))
        else:
            missing.append(part)
    resumed = tally.runs
    began = time.perf_counter()

    def keep(part: range, result: Tally) -> None:
        path = _result_of(kept, part)
        path.with_suffix(".part").write_text(result.to_json())
        path.with_suffix(".part").rename(path)
        rate = result.runs / result.seconds
        print(f"{part[0]} .. {part[-1]}: {len(result.failed)} violations, {rate:.1f} runs a second",
              file=sys.stderr, flush=True)  # fmt: skip

    tally.add(_run_slices(missing, args.jobs, keep))
    wall_s = time.perf_counter() - began
    print(table(tally))
    print("Cells that cannot be hit:")
    print(reasons())
    write_failures(tally)
    result = figures(tally, first, resumed, wall_s)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


def _result_of(folder: Path, part: range) -> Path:
    return folder / f"{part.start}-{len(part)}.json"


if __name__ == "__main__":
    sys.exit(main())
