"""The share of prompt tokens found in prefix caches, by policy.

A trace of conversations is replayed in virtual time by a simulated fleet: round robin, least load,
the real routers (1 and 3 of them) and an oracle. Two fleets: workers that do both, and separate
prefill. The definitions are in docs/scale.md.

    python benchmarks/scale/prefix_routing.py [--trace FILE] [--seeds 1 2 3] [--markdown]
"""

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prefix_fleet import FleetShape, Placement, SimulatedFleet
from prefix_policies import RealRouters, least_load, oracle, round_robin
from prefix_trace import BLOCK_TOKENS, TraceRequest, generate, leading, read, statistics

MOST_LOAD = 1.3  # of the oracle that counts
FLEETS = {"mixed": FleetShape(decodes=16), "separate": FleetShape(decodes=4, prefills=12)}
ORACLES = (1, 2, 4, 8, 16)  # work ratios
ROUTERS = (1, 3)
COLUMNS = ("hit_rate", "load", "load_windows", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s")
Figures = dict[str, float]


def replay(
    shape: FleetShape,
    trace: Sequence[TraceRequest],
    placement: Callable[[SimulatedFleet], Placement],
) -> Figures:
    """The figures of one policy; `load` is that of the role with the most uneven load."""
    fleet = SimulatedFleet(shape)
    figures = fleet.run(trace, placement(fleet))
    for name in ("load", "load_windows"):
        figures[name] = max(v for k, v in figures.items() if k.endswith(f"_{name}"))
    return figures


def policies(
    shape: FleetShape, trace: Sequence[TraceRequest], seed: int, routers: Sequence[int] = ROUTERS
) -> dict[str, Figures]:
    """The figures of each policy by its name, the oracle's last."""
    found = {
        "round robin": replay(shape, trace, round_robin),
        "least load": replay(shape, trace, least_load),
    }
    for number in routers:
        name = f"{number} router{'s' * (number > 1)}"
        found[name] = replay(shape, trace, partial(RealRouters, num_routers=number, seed=seed))
    oracles = [replay(shape, trace, partial(oracle, work_ratio=ratio)) for ratio in ORACLES]
    # The one with the most hits within the bound; if all exceed it, the best is still a bound.
    found["oracle"] = max(oracles, key=lambda o: (o["load"] <= MOST_LOAD, o["hit_rate"]))
    return found


def pooled(trace: Sequence[TraceRequest], num_blocks: int) -> float:
    """Hit rate of a single cache of the fleet's total size: no duplicates, whatever the load."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = 0
    for request in trace:
        blocks = request.full_blocks
        found += leading(blocks, cache) * BLOCK_TOKENS
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return round(found / sum(request.num_tokens for request in trace), 3)


def relative(found: dict[str, Figures]) -> dict[str, Figures]:
    """The figures of the real routers relative to those of the other policies."""
    best, least = found["oracle"]["hit_rate"], found["round robin"]["hit_rate"]
    by_load = found["least load"]
    rows = {name: figures for name, figures in found.items() if "router" in name}
    return {
        name: {
            "of_oracle": round(figures["hit_rate"] / best, 3),
            "of_round_robin": round(figures["hit_rate"] / least, 2),
            "load": figures["load"],
            "ttft_mean_of_least_load": round(figures["ttft_mean_s"] / by_load["ttft_mean_s"], 3),
            "ttft_p99_of_least_load": round(figures["ttft_p99_s"] / by_load["ttft_p99_s"], 3),
        }
        for name, figures in rows.items()
    }


def markdown(results: dict[str, Any]) -> Iterator[str]:
    """The tables of docs/scale.md."""
    statistic = {name: result["trace"] for name, result in results.items()}
    keys = list(next(iter(statistic.values())))
    yield "| trace | " + " | ".join(keys) + " |"
    yield "|---" * (len(keys) + 1) + "|"
    for name, values in statistic.items():
        yield f"| {name} | " + " | ".join(str(values[key]) for key in keys) + " |"
    yield ""
    yield "| trace | fleet | policy | " + " | ".join(COLUMNS) + " |"
    yield "|---" * (len(COLUMNS) + 3) + "|"
    for name, result in results.items():
        for fleet in FLEETS:
            for policy, figures in result[fleet]["policies"].items():
                cells = " | ".join(f"{figures[column]:.3f}" for column in COLUMNS)
                yield f"| {name} | {fleet} | {policy} | {cells} |"
            found = f"{result[fleet]['pooled']:.3f}"
            yield f"| {name} | {fleet} | one pooled cache | {found} | | | | | |"


def measure(trace: Sequence[TraceRequest], seed: int) -> dict[str, Any]:
    result: dict[str, Any] = {"trace": statistics(trace)}
    for name, shape in FLEETS.items():
        found = policies(shape, trace, seed)
        workers = shape.prefills or shape.decodes
        result[name] = {
            "relative": relative(found),
            "pooled": pooled(trace, workers * shape.speed.blocks),
            "policies": found,
        }
        print(f"{seed} {name}: {json.dumps(result[name]['relative'])}", file=sys.stderr, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's form instead of seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/scale.md")
    args = parser.parse_args()
    if args.trace is not None:
        results = {args.trace.name: measure(read(args.trace), 1)}
    else:
        results = {f"seed {seed}": measure(generate(seed), seed) for seed in args.seeds}
    if args.markdown:
        print("\n".join(markdown(results)))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
