"""Line 2: 10,000 simulated runs, on random seeds, over every cell of the fault matrix.

The oracle objects to none. The figures list the seeds, so that a run can be repeated.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNS = 10_000


def main() -> int:
    done = subprocess.run(
        [sys.executable, "-m", "simulation.sweep", "--runs", str(RUNS)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    print("\n".join(lines[:-1]))
    figures = json.loads(lines[-1])
    figures["ok"] = figures["ok"] and figures["runs"] == RUNS and done.returncode == 0
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
