"""Run cases of one target in a separate process, since it may die.

`python -m fuzz.child TARGET FIRST COUNT FOLDER` prints a JSON object per thousand cases, and at
the end: {"next": the next seed, "outcomes": counts by outcome}. A case that raises, takes longer
than CASE_S or needs more memory than ROOM_BYTES ends it; the last line of standard error names the
case.
"""

import faulthandler
import importlib
import json
import logging
import resource
import signal
import sys
from collections import Counter
from pathlib import Path
from random import Random

from fuzz.target import Target

CASE_S = 10  # wall clock: a busy machine is no finding
ROOM_BYTES = 512 << 20
REPORT = 1000


def main(name: str, first: int, count: int, folder: Path) -> None:
    logging.disable(logging.CRITICAL)
    target: Target = importlib.import_module(f"fuzz.targets.{name}").Fuzzed(folder)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, most))
    outcomes: Counter[str] = Counter()

    def late(*_: object) -> None:
        faulthandler.dump_traceback()
        raise SystemExit(f"{name}: seed {seed} takes longer than {CASE_S} s")

    signal.signal(signal.SIGALRM, late)
    seed = first
    for seed in range(first, first + count):
        signal.alarm(CASE_S)
        try:
            outcomes[target.case(Random(f"{name} {seed}"))] += 1
        except BaseException:
            print(f"{name}: seed {seed} fails", file=sys.stderr)
            raise
        if (seed + 1 - first) % REPORT == 0:
            print(json.dumps({"next": seed + 1, "outcomes": outcomes}), flush=True)
            outcomes.clear()
    signal.alarm(0)
    print(json.dumps({"next": first + count, "outcomes": outcomes}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
