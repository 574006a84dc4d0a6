"""`make bench-gpu` on the fake device, in its short form (--smallest): CI has no GPU, and all
sizes would take a minute."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run import FAILED, ORDER, OUT_OF_TIME, PASSED, SKIPPED, groups, judged

RUN = Path(__file__).parents[2] / "benchmarks/gpu/run.py"


def run(out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, str(RUN), "--fake", "--smallest", "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(out.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == result, done.stderr
    return done.returncode, result


@pytest.mark.kernels
@pytest.mark.timeout(400)
def test_all_parts_run_on_the_fake_device(tmp_path: Path) -> None:
    code, result = run(tmp_path / "result.json")
    parts = result["parts"]
    assert parts.keys() == {planned.name for planned in ORDER} | {"build"}
    assert {about["status"] for about in parts.values()} == {PASSED}, result
    assert code == 0
    assert result["fake"]
    checks = [verdict for about in parts.values() for verdict in about.get("checks", {}).values()]
    assert checks.count("held") >= 25


def test_parts_without_time_left_are_reported(tmp_path: Path) -> None:
    code, result = run(tmp_path / "result.json", "--seconds", "4.5", "--parts", "facts", "system")
    assert code == 2
    assert result["parts"]["system"]["status"] in (OUT_OF_TIME, SKIPPED)
    assert result["seconds"] < 20


def test_only_parts_that_measure_no_time_run_together() -> None:
    together = [[one.name for one in some] for some in groups(list(ORDER)) if len(some) > 1]
    assert together == [["invariance", "handed_over", "system", "kills", "sanitizer"]]
    alone = [one for one in ORDER if one.name != "invariance"]
    assert all(len(some) == 1 for some in groups(alone))


@pytest.mark.parametrize(
    ("checks", "code", "error", "expected"),
    [
        ({"a": "held"}, 0, "", (PASSED, "")),
        ({"a": "held", "b": "skipped: no MPS"}, 0, "", (PASSED, "without b: no MPS")),
        ({"b": "skipped: no MPS"}, 0, "", (SKIPPED, "b: no MPS")),
        ({"a": "held", "b": "failed"}, 0, "", (FAILED, "b")),
        ({"a": "failed"}, None, "", (FAILED, "a")),
        ({"a": "held"}, None, "", (OUT_OF_TIME, "it took more than 5 s")),
        ({"a": "held"}, 1, "ValueError: no", (FAILED, "ValueError: no")),
        ({"a": "held"}, -11, "", (FAILED, "its process ended with -11")),
        ({}, 0, "", (FAILED, "it has told nothing")),
    ],
)
def test_a_part_is_judged_by_its_checks(
    checks: dict[str, str], code: int | None, error: str, expected: tuple[str, str]
) -> None:
    record = {"checks": checks, "figures": {}} | ({"error": error} if error else {})
    assert judged(record, code, 5.0) == expected
