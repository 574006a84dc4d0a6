"""Line 6: a traced request goes the way that docs/architecture.md tells; the docs name what is."""

import json

from pytest_line import run_tests

READS_PROSE = True

path, docs = run_tests("tests/system/test_architecture.py"), run_tests("tests/test_docs.py")
print(json.dumps({"ok": path["ok"] and docs["ok"], "path": path, "docs": docs}))
