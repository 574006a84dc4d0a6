"""Line 9: permissions, compared with running systems, and the tests that the table of attacks in
docs/security.md names: none of them may be skipped."""

import json
import sys
from pathlib import Path

from pytest_line import run_tests

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from test_security_table import rows

READS_PROSE = True
RIGHTS = [f"tests/system/test_{name}.py" for name in ("rights", "roles", "ports")]
ATTACKS = sorted({f"{file}::{test}" for tests in rows().values() for file, test in tests})

rights = run_tests(*RIGHTS)
table = run_tests("tests/test_security_table.py")
attacks = run_tests(*ATTACKS)
parts = {"rights": rights, "table": table, "attacks": attacks}
print(json.dumps({"ok": all(part["ok"] for part in parts.values()), **parts}))
