"""The model check over its whole space, and eleven seeded bugs that it finds: `make modelcheck`.

As many parallel runs as there are cores; a quarter of an hour of one core.
"""

import json
import multiprocessing
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from oracles.handoff_model.bugs import BUGS
from oracles.handoff_model.check import Result, explore
from oracles.handoff_model.config import WHOLE


def seeded(number: int) -> Result:
    """The run that finds a bug. By number, since a rule may be a lambda."""
    bug = BUGS[number]
    return explore(bug.config, bug.rules, bug.breaks)


def show(title: str, result: Result) -> None:
    print(f"{title}: {result.violation or 'no violation'}", file=sys.stderr)
    print("\n".join(result.trace), file=sys.stderr, flush=True)


def main() -> int:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        running = [pool.submit(explore, config) for config in WHOLE]
        found = dict(zip(BUGS, pool.map(seeded, range(len(BUGS))), strict=True))
        for bug, result in found.items():
            show(f"seeded bug: {bug.name}", result)
        results = []
        for future in running:
            result = future.result()
            results.append(result)
            show(result.config, result)
            print(json.dumps(figures(result)), file=sys.stderr, flush=True)
    bugs = {b.name: r.violation for b, r in found.items() if r.violation.startswith(b.breaks)}
    events = sum((r.happened for r in results), Counter[str]())
    complete = all(r.complete for r in results)
    summary = {
        "ok": complete and len(bugs) == len(BUGS),
        "states": sum(r.states for r in results),
        "transitions": sum(r.transitions for r in results),
        "violations": sum(bool(r.violation) for r in results),
        "bugs_found": len(bugs),
        "bugs": bugs,
        "trace_lengths": {b.name: len(r.trace) for b, r in found.items()},
        "runs": {r.config: figures(r) for r in results},
        "events": dict(sorted(events.items())),
    }
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1


def figures(result: Result) -> dict[str, Any]:
    return {
        "states": result.states,
        "transitions": result.transitions,
        "depth": result.depth,
        "ends": result.ends,
        "complete": result.complete,
        "seconds": result.seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
