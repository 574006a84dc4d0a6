"""Runs chosen tests and gives their counts: the figures of a line that a test already checks."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
RUNS = 2  # of pytest, in `make test`
# The two runs write at the same time, so a summary may follow the other's dots.
SUMMARY = re.compile(r"\d+ (?:failed|passed|error).* in [\d.]+s.*$", re.MULTILINE)


def results(output: str) -> list[str]:
    """The last line of each run of pytest in the output of `make test`, which has two."""
    return SUMMARY.findall(output)


def run_tests(*words: str) -> dict[str, Any]:
    """Counts of a pytest run; not ok when a test failed, was skipped or none was found."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pytest", "-q", f"--junitxml={report}", *words],
            cwd=ROOT,
            stdout=sys.stderr,
        )
        suite = ET.parse(report).getroot().find("testsuite")
        assert suite is not None
        counts = {n: int(suite.get(n, 0)) for n in ("tests", "failures", "errors", "skipped")}
        skips = [s.get("message", "") for s in suite.iter("skipped")]
    wrong = counts["failures"] + counts["errors"] + counts["skipped"]
    return {"ok": done.returncode == 0 and counts["tests"] > 0 and wrong == 0, **counts} | (
        {"skips": skips} if skips else {}
    )
