"""Line 10: 100,000 simulated runs on seeds from 1,000,000 on: no violation, every cell hit.

In parts of 10,000; one that has passed is run again only if its sources have changed. About two
hours on two cores.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from accept import DIRTY, commit, source_tree

ROOT = Path(__file__).parents[2]
STORE = ROOT / "build/structure"
FIRST, RUNS, PART = 1_000_000, 100_000, 10_000
PRODUCT = ("gateway", "services", "engine", "kernels", "protos", "CMakeLists.txt")
RAN = (*PRODUCT, "tests/simulation", "tests/support", "pyproject.toml", "constraints.txt")


def sources() -> tuple[str, str]:
    """The commit, and a hash of the sources that a part runs."""
    return commit(), source_tree(paths=RAN)


def run(first: int) -> dict[str, Any]:
    """Figures of one part; every part has every cell's fault."""
    before = sources()
    path = STORE / before[1] / f"simulation-{first}.json"
    if path.exists() and not before[0].endswith(DIRTY):
        return dict(json.loads(path.read_text()))
    done = subprocess.run(
        [sys.executable, "-m", "simulation.sweep", "--runs", str(PART), "--first", str(first)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    sys.stderr.write("\n".join(line for line in lines if line.startswith("seed ")) + "\n")
    figures: dict[str, Any] = json.loads(lines[-1])
    figures["ok"] = figures["ok"] and done.returncode == 0 and figures["runs"] == PART
    figures["commit"] = before[0]
    print(f"from {first}: {figures}", file=sys.stderr, flush=True)
    if sources() != before:
        raise SystemExit("the sources changed under way")
    if figures["ok"] and not before[0].endswith(DIRTY):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures))
    return figures


def main() -> int:
    parts = [run(first) for first in range(FIRST, FIRST + RUNS, PART)]
    summed = Counter({k: sum(p[k] for p in parts) for k in ("runs", "violations", "hits")})
    figures = {
        "ok": all(part["ok"] for part in parts) and summed["runs"] == RUNS,
        "seeds": [FIRST, FIRST + RUNS - 1],
        **summed,
        "cells": parts[0]["cells"],
        "cells_hit_by_every_part": min(part["cells_hit"] for part in parts),
        "measured_on": sorted({part["commit"] for part in parts}),
        "wall_s": round(sum(part["wall_s"] for part in parts)),
    }
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
