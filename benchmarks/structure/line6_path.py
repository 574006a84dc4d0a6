"""Line 6: a traced request follows the path in docs/architecture.md; the docs name only existing
things."""

import json

from pytest_line import run_tests

READS_PROSE = True

path, docs = run_tests("tests/system/test_architecture.py"), run_tests("tests/test_docs.py")
print(json.dumps({"ok": path["ok"] and docs["ok"], "path": path, "docs": docs}))
