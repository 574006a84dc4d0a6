"""Line 9: who may do what, compared with running systems, and a test for each line of the list."""

import json

from pytest_line import run_tests

READS_PROSE = True
RIGHTS = [f"tests/system/test_{name}.py" for name in ("rights", "roles", "ports")]

rights, checklist = run_tests(*RIGHTS), run_tests("tests/test_checklist.py")
print(json.dumps({"ok": rights["ok"] and checklist["ok"], "rights": rights, "lines": checklist}))
