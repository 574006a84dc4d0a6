"""Line 9: who may do what, compared with running systems, and the tests that the lines of the
checklist name: none of them may be skipped."""

import json
import sys
from pathlib import Path

from pytest_line import run_tests

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from test_checklist import named

READS_PROSE = True
RIGHTS = [f"tests/system/test_{name}.py" for name in ("rights", "roles", "ports")]

rights = run_tests(*RIGHTS)
checklist = run_tests("tests/test_checklist.py")
shown = run_tests(*(f"tests/{test}" for test in named()))
parts = {"rights": rights, "lines": checklist, "named by lines": shown}
print(json.dumps({"ok": all(part["ok"] for part in parts.values()), **parts}))
