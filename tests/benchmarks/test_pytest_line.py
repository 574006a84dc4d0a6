"""A line that runs tests: its counts, the properties that tests record, and the effect of skips."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.extended

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN = """import json, sys
from pytest_line import run_tests, skips_said
print(json.dumps(skips_said(run_tests("-p", "no:cacheprovider", "-W", "error", sys.argv[1]))))
"""
RECORDS = "def test_a(record_property): record_property('image MB', 213)\n"
SKIPS = "import pytest\ndef test_b(): pytest.skip('NO DATABASE')\n"
FAILS = "def test_c(): assert False\n"
NO_MODULE = "import pytest\npytest.skip('NO COMPILER', allow_module_level=True)\n"
ENDS = "def test_d(): pytest.exit('enough', returncode=3)\n"


def ran(folder: Path, text: str) -> dict[str, Any]:
    module = folder / "test_it.py"
    module.write_text(text)
    words = [sys.executable, "-c", RUN, str(module)]
    where = {"PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run(words, env=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_recorded_properties_are_among_the_figures(tmp_path: Path) -> None:
    found = ran(tmp_path, RECORDS)
    assert found["ok"]
    assert found["recorded"] == {"image MB": "213"}


@pytest.mark.parametrize(
    ("text", "ok", "skipped"),
    [
        (RECORDS + SKIPS, True, "NO DATABASE"),
        (RECORDS + SKIPS + FAILS, False, 1),
        (NO_MODULE, True, "collection skipped"),
        (RECORDS + SKIPS + ENDS, False, 1),
    ],
)
def test_only_a_complete_run_without_failures_counts_as_skipped(
    tmp_path: Path, text: str, ok: bool, skipped: object
) -> None:
    found = ran(tmp_path, text)
    assert (found["ok"], found["skipped"]) == (ok, skipped)
