"""`make bench-gpu` on the fake device, in its short form (--smallest): CI has no GPU, and all
sizes would take a minute."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run import DONE, FAILED, ORDER, OUT_OF_TIME, SKIPPED, groups, outcome

RUN = Path(__file__).parents[2] / "benchmarks/gpu/run.py"


def run(out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, str(RUN), "--fake", "--smallest", "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(out.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == result, done.stderr
    return done.returncode, result


def bound_of(kernel: str) -> float:
    """The largest error of a kernel's result, relative to its largest value."""
    rounded = 2.0**-8  # a result of bfloat16
    if kernel.startswith("linear"):
        return 0.0 if kernel.endswith("bits alone") else 1e-4  # float32, of products of bfloat16
    return rounded * (4 if kernel == "experts" else 2 if kernel.startswith("attention") else 1)


@pytest.mark.kernels
@pytest.mark.timeout(400)
def test_all_parts_run_on_the_fake_device(tmp_path: Path) -> None:
    code, result = run(tmp_path / "result.json")
    parts = result["parts"]
    assert parts.keys() == {planned.name for planned in ORDER} | {"build"}
    assert {about["status"] for about in parts.values()} == {DONE}, result
    assert code == 0
    assert result["fake"]
    figures = {name: about["figures"] for name, about in parts.items() if "figures" in about}
    assert figures["facts"]["copy_is_equal"]
    errors = figures["kernels"]["errors"]
    assert len(errors) >= 20
    assert [name for name, error in errors.items() if error > bound_of(name)] == []
    assert errors["values"] == figures["kernels"]["unlike_tokens"] == 0
    assert figures["kernels"]["logprob_error"] <= 1e-5
    differences = [n for name, n in figures["invariance"].items() if name.endswith("differences")]
    assert len(differences) >= 8
    assert not any(differences)
    handed_over = figures["handed_over"]
    assert (handed_over["same_bits"], handed_over["same_bits_without_keys"]) == (True, False)
    assert handed_over["taken"] == handed_over["frames"] > 0 == handed_over["damaged"]
    assert figures["handoff"]["hash"]["equal"]
    kills = figures["kills"]
    assert kills["prefill_kills"]["survived"] == kills["decode_kills"]["survived"] == 1
    assert kills["prefill_kills"]["frames"] > 0 == kills["prefill_kills"]["wrong_blocks"]
    assert kills["prefill_kills"]["windows"] <= 4
    system, throughput = figures["system"], figures["throughput"]
    assert system["remote"] == system["requests"]
    assert system["bytes"] > 0 == system["replay_code"]
    assert system["tokens"] == system["tokens_requested"]
    assert system["unlike_mixed_mode"] == []
    assert throughput["answer_tokens"] == throughput["answer_tokens_requested"]
    assert throughput["idle_of_steps"] is not None
    watched = [figures["sanitizer"][f"memcheck of {name}"] for name in ("kernels", "handoff")]
    assert all(one["code"] == 0 and one["figures"] for one in watched)


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


NO_MPS = {"with MPS": "it is not installed"}


@pytest.mark.parametrize(
    ("figures", "skipped", "code", "error", "expected"),
    [
        ({"a": 1}, {}, 0, "", (DONE, "")),
        ({"a": 1}, NO_MPS, 0, "", (DONE, "except with MPS: it is not installed")),
        ({}, NO_MPS, 0, "", (SKIPPED, "with MPS: it is not installed")),
        ({"a": 1}, {}, None, "", (OUT_OF_TIME, "it took more than 5 s")),
        ({"a": 1}, {}, 1, "ValueError: no", (FAILED, "ValueError: no")),
        ({"a": 1}, {}, -11, "", (FAILED, "its process ended with -11")),
        ({}, {}, 0, "", (FAILED, "it has written no figures")),
    ],
)
def test_the_status_of_a_part(
    figures: dict[str, int],
    skipped: dict[str, str],
    code: int | None,
    error: str,
    expected: tuple[str, str],
) -> None:
    record = {"figures": figures, "skipped": skipped} | ({"error": error} if error else {})
    assert outcome(record, code, 5.0) == expected
