"""Find the shortest scenario that breaks the same rule.

    python -m simulation.shrink --seed 7 --cell "SIGKILL decode" decoding
    python -m simulation.shrink --scenario FILE

Drops faults, requests and processes and shortens the rest, as long as the oracle reports the same
violations, numbers and names aside. Prints the scenario as JSON for `run.py --scenario`.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from simulation.run import Result, make, simulate
from simulation.scenario import Ask, Scenario

Simulate = Callable[[Scenario], Result]


def rules(result: Result) -> set[str]:
    """Return the broken rules without the names and numbers of this run."""
    return {re.sub(r"\[.*?\]|\w*\d\w*|^target|^warm", "#", text) for text in result.violations}


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios that are one step shorter, largest steps first."""
    for i in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:i] + scenario.faults[i + 1 :])
    needed = {fault.request for fault in scenario.faults}
    for ask in scenario.asks:
        if ask.name not in needed:
            yield replace(scenario, asks=tuple(a for a in scenario.asks if a is not ask))
    if scenario.gateways > 1:
        asks = tuple(replace(ask, gateway=0) for ask in scenario.asks)
        yield replace(scenario, gateways=1, asks=asks)
    for name in ("routers", "prefills", "decodes"):
        if getattr(scenario, name) > 1:
            yield replace(scenario, **{name: getattr(scenario, name) - 1})
    if scenario.window:
        yield replace(scenario, window=0)
    for ask in scenario.asks:
        for change in (
            {"n": 1},
            {"max_tokens": ask.max_tokens // 2},
            {"prompt": ask.prompt[: len(ask.prompt) // 2]},
            {"prompt": ask.prompt[:-4]},
            {"at_s": 0.0},
        ):
            shorter = replace(ask, **change)  # type: ignore[arg-type]
            if shorter != ask and shorter.max_tokens and shorter.prompt:
                yield _with(scenario, ask, shorter)


def _with(scenario: Scenario, ask: Ask, other: Ask) -> Scenario:
    return replace(scenario, asks=tuple(other if a is ask else a for a in scenario.asks))


def shrunk(scenario: Scenario, run: Simulate = simulate, most: int = 200) -> Scenario:
    """Return the shortest scenario found in at most `most` runs. Raises ValueError if nothing is
    wrong."""
    broken = rules(run(scenario))
    if not broken:
        raise ValueError("the oracle has no objection to this scenario")
    runs = 0
    found = True
    while found and runs < most:
        found = False
        for candidate in smaller(scenario):
            runs += 1
            if rules(run(candidate)) & broken:
                scenario, found = candidate, True
                break
            if runs >= most:
                break
    return scenario


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cell", nargs=2, metavar=("FAULT", "PHASE"))
    parser.add_argument("--scenario", type=Path)
    args = parser.parse_args()
    if args.scenario is not None:
        scenario = Scenario.from_json(args.scenario.read_text())
    elif args.cell is not None:
        scenario = make(args.seed, *args.cell)
    else:
        parser.error("name a --scenario or a --cell")
    print(shrunk(scenario).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
