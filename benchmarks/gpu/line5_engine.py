"""Line 5: the engine with recorded steps that run ahead. Its tests pass, and tokens equal those of
single steps; the cost of its Python code per row at 256 rows."""

import json
from pathlib import Path

from gpu.engine_cost import cost
from pytest_line import run_tests

TESTS = Path(__file__).parents[2] / "tests/engine"
MOST_US = 8.0  # of CPU per row and step
SUITE = ("test_engine*.py", "test_window_pools.py", "models/test_cuda_graphs.py")

suite = run_tests(*(str(path) for name in SUITE for path in sorted(TESTS.glob(name))))
ahead, one_by_one = cost(256, ahead=True), cost(256, ahead=False)
ok = suite["ok"] and ahead["least"] <= MOST_US
figures = {"tests": suite, "us_a_row_ahead": ahead, "us_a_row_one_by_one": one_by_one}
print(json.dumps({"ok": ok, **figures}))
