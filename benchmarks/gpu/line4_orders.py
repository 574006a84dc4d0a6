"""Line 4: cuda_ipc on the fake CUDA runtime, in 10,000 seeded orders of its streams.

No order reads wrong bytes or leaks scratch memory, and each reintroduced fault is found in at most
100 orders. No GPU is used. The orders are split over the machine's cores; 15 minutes on two.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from systems.cuda_orders import FAULTS, Handoff, Stuck, WrongBytes, orders_until_found

from pdserve.engine.transport.device import DeviceError

ORDERS = 10_000
MOST = 100  # orders until a fault is found
PIECE = 50  # orders per task of a process


def run(seeds: range) -> tuple[Counter[str], list[str]]:
    """The counts of a run, and its errors."""
    counts, wrong = Counter[str](), list[str]()
    for seed in seeds:
        handoff = Handoff(seed)
        counts["orders"] += 1
        try:
            handoff.run()
        except (AssertionError, DeviceError) as err:
            kind = {WrongBytes: "wrong_bytes", Stuck: "stuck_scratch"}.get(type(err), "errors")
            counts[kind] += 1
            wrong.append(f"order {seed}: {type(err).__name__}: {err}")
        counts.update({name: handoff.seen[name] for name in ("frames", "taken", "probes")})
    return counts, wrong


def summed(results: Iterable[tuple[Counter[str], list[str]]]) -> tuple[Counter[str], list[str]]:
    counts, wrong = Counter[str](), list[str]()
    for some, errors in results:
        counts.update(some)
        wrong += errors
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, default=ORDERS, help="fewer, to try the script")
    orders = parser.parse_args().orders
    pieces = [range(at, min(at + PIECE, orders)) for at in range(0, orders, PIECE)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        found = pool.map(partial(orders_until_found, most=MOST), FAULTS)
        counts, wrong = summed(pool.map(run, pieces))
        until_found = dict(zip(FAULTS, found, strict=True))
    figures = {
        "name": "cuda_ipc_orders",
        "orders": counts["orders"],
        "wrong_bytes": counts["wrong_bytes"],
        "stuck_scratch": counts["stuck_scratch"],
        "errors": counts["errors"],
        "frames": counts["frames"],
        "taken": counts["taken"],
        "probes": counts["probes"],
        "orders_until_found": until_found,
        "wrong": wrong[:5],
        "ok": not wrong and counts["orders"] == ORDERS and all(until_found.values()),
    }
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
