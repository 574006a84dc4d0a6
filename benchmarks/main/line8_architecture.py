"""Line 8: a test adds a new architecture as one file at run time; the docs name only existing
things."""

import json

from pytest_line import run_tests

READS_PROSE = True

added, docs = run_tests("tests/engine/models", "-k", "run_time"), run_tests("tests/test_docs.py")
print(json.dumps({"ok": added["ok"] and docs["ok"], "architecture": added, "docs": docs}))
