"""Line 7: every public name of the Python API has an example in docs/python.md that runs, and
`import pdserve` takes at most 50 ms."""

import json
import statistics
import subprocess
import sys
import time

from pytest_line import run_tests

READS_PROSE = True
RUNS = 15
BOUND_MS = 50.0


def milliseconds(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - started) * 1000


def main() -> None:
    tests = run_tests("tests/services/llm")
    pairs = [(milliseconds("pass"), milliseconds("import pdserve")) for _ in range(RUNS)]
    bare, whole = (statistics.median(times) for times in zip(*pairs, strict=True))
    figures = {
        "ok": tests["ok"] and whole - bare <= BOUND_MS,
        "tests": tests,
        "import_ms": round(whole - bare, 1),  # beyond the start of the interpreter
        "interpreter_ms": round(bare, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
