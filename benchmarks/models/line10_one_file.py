"""Line 10: an architecture, a weight format and a quantization method are one file each, which
tests add at run time; the docs explain it."""

import json

from pytest_line import run_tests

READS_PROSE = True

parts = {
    "architecture": run_tests("tests/engine/models", "-k", "run_time"),
    "format and method": run_tests("tests/engine/test_added.py"),
    "docs": run_tests("tests/test_docs.py"),
}
print(json.dumps({"ok": all(part["ok"] for part in parts.values()), **parts}))
