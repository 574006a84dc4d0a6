"""Run chosen tests and return their counts: the figures of a line that is covered by tests."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
MARKS = "not compose and not clients"
NOTHING_COLLECTED = 5  # pytest's exit code, also if whole modules are skipped
SUMMARY = re.compile(r"\d+ (?:failed|passed|error).* in [\d.]+s.*$", re.MULTILINE)


def results(output: str) -> list[str]:
    """The last line of each pytest run in the output of `make test`."""
    return SUMMARY.findall(output)


def skips_said(tests: dict[str, Any]) -> dict[str, Any]:
    """The counts of a run; a complete run with only skips against it is skipped for their
    reasons."""
    none_ran = tests["exit_code"] == NOTHING_COLLECTED and tests["tests"] == tests["skipped"]
    wrong = tests["failures"] + tests["errors"]
    if not tests["skipped"] or wrong or not (tests["exit_code"] == 0 or none_ran):
        return tests
    reasons = sorted({" ".join(reason.split()) for reason in tests["skips"]})
    return tests | {"ok": True, "skipped": "; ".join(reasons)}


def run_tests(*words: str) -> dict[str, Any]:
    """Counts of a pytest run, and the properties that its tests recorded (`record_property`); not
    ok if a test failed or was skipped, or if there is none."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # has the recorded properties
        to = (f"--junitxml={report}", "--override-ini=junit_family=xunit1")
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pytest", "-q", "-m", MARKS, *to, *words],
            cwd=ROOT,
            stdout=sys.stderr,
        )
        suite = ET.parse(report).getroot().find("testsuite")
        assert suite is not None
        counts = {n: int(suite.get(n, 0)) for n in ("tests", "failures", "errors", "skipped")}
        counts["exit_code"] = done.returncode
        skips = [s.get("message", "") for s in suite.iter("skipped")]
        recorded = {p.get("name"): p.get("value") for p in suite.iter("property")}
    wrong = counts["failures"] + counts["errors"] + counts["skipped"]
    told = {"skips": skips, "recorded": recorded}
    return {"ok": done.returncode == 0 and counts["tests"] > 0 and wrong == 0, **counts} | {
        name: value for name, value in told.items() if value
    }
