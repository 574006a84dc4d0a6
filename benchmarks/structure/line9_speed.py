"""Line 9, third part: the engine is as fast as at the commit before, run by run against a build of
that.

The commit is checked out of git and set up (earlier.py). Then both engines run the table's works of
pdserve alternately. A work is slower if its median ratio is below LEAST and so many pairs are below
1 that chance explains it in less than one case of twenty (sign test); otherwise the difference is
noise. `--pairs N`, `--rows NAME ...` (decode_x1_llamacpp, ...) and `--any-load` as in bench.py.
"""

import argparse
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks/cpu"))

import bench  # noqa: E402
import earlier  # noqa: E402
import machine  # noqa: E402
from contender import MODELS, Contender, engine_command  # noqa: E402
from peers import PEERS  # noqa: E402
from ratios import Bound, ratios, spread  # noqa: E402
from table import ROWS, Row  # noqa: E402

BEFORE = "bac4786"
LEAST = 0.97
PAIRS = 11
CHANCE = 0.05


def by_chance(slower: int, pairs: int) -> float:
    """The probability of this many slower pairs, or more, if both engines are equally fast."""
    return sum(math.comb(pairs, k) for k in range(slower, pairs + 1)) / 2**pairs


def before(name: str) -> str:
    return f"{name} before"


def start(name: str, model: Path, home: Path | None = None) -> Contender:
    """An engine of this tree, or of the commit that is set up in `home`."""
    words = engine_command(model)
    if home is not None:
        script = home / "benchmarks/cpu/contend_pdserve.py"
        words = [str(home / ".venv/bin/python"), "-P", str(script), *words[3:]]
    called = before(name) if home is not None else name
    return Contender(called, words, PEERS / "logs" / f"{called.replace(' ', '-')}.log")


def compared(
    names: list[str] | None, pairs: int, any_load: bool, commit: str = BEFORE
) -> dict[str, Any]:
    """Ratios of this tree to a commit, by work."""
    home = earlier.build(commit)
    cores = machine.pin()
    works = {(r.ours, r.work) for r in ROWS if names is None or r.name in names}
    rows = tuple(Row("", work, name, before(name), Bound(LEAST, 1.0)) for name, work in works)
    (PEERS / "logs").mkdir(parents=True, exist_ok=True)
    loads = [machine.quiet(cores, any_load)]
    with ExitStack() as stack:
        cast = {}
        for name in sorted({row.ours for row in rows}):
            model = MODELS[name]()
            for of in (None, home):
                one = stack.enter_context(start(name, model, of))
                cast[one.name] = one
        loads.append(machine.quiet(cores, any_load))
        speeds = bench.race(rows, cast, pairs)
    loads.append(machine.quiet(cores, any_load))
    found: dict[str, Any] = {}
    for row in rows:
        found_ratios = ratios(speeds[row.ours, row.work], speeds[row.theirs, row.work])
        ratio, slower = spread(found_ratios), sum(r < 1 for r in found_ratios)
        found[f"{row.ours}, {row.work.name}"] = {
            "ok": ratio.median >= LEAST or by_chance(slower, len(found_ratios)) >= CHANCE,
            "now_to_before": ratio.as_json(),
            "slower_pairs": slower,
        }
    return {
        "ok": all(work["ok"] for work in found.values()),
        "before": commit,
        "least_median": LEAST,
        "pairs": pairs,
        "load_by_others": [round(load, 3) for load in loads],
        "works": dict(sorted(found.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--any-load", action="store_true")
    args = parser.parse_args()
    figures = compared(args.rows, args.pairs, args.any_load)
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
