"""A contender's child process: answers, crashes and prompts."""

import sys
from pathlib import Path

import pytest
from contender import Contender
from peers import needed
from table import X1, Work
from token_ids import prompt_ids

ECHO = """
import json, sys
print(json.dumps({"ready_s": 1.5}), flush=True)
for line in sys.stdin:
    if line.startswith("die"):
        sys.exit("a reason")
    _, batch, prompt, new, number = line.split()
    print(json.dumps({"prefill_s": 0.5, "decode_s": int(new) - 1.0}), flush=True)
"""


def contender(tmp_path: Path) -> Contender:
    return Contender("echo", [sys.executable, "-c", ECHO], tmp_path / "log")


def test_figures_are_tokens_of_the_phase_over_its_seconds(tmp_path: Path) -> None:
    with contender(tmp_path) as echo:
        assert echo.ready == {"ready_s": 1.5}
        assert echo.run(X1, 0) == 1.0  # the first token belongs to prefill
        assert echo.run(Work("decode", 8, 128, 64), 1) == 8.0
        assert echo.run(Work("prefill", 1, 512, 1), 2) == 1024.0


def test_a_crash_is_reported_with_the_last_output(tmp_path: Path) -> None:
    with (
        contender(tmp_path) as echo,
        pytest.raises(RuntimeError, match=r"ended with 1(.|\n)*a reason"),
    ):
        echo.ask("die")


def test_prompts_are_repeatable_and_share_no_prefix() -> None:
    many = [prompt_ids(128, number, 49152) for number in range(300)]
    assert many == [prompt_ids(128, number, 49152) for number in range(300)]
    assert len({ids[:4] for ids in many}) == 300
    assert all(300 <= i < 49152 for ids in many for i in ids)
    assert {len(ids) for ids in many} == {128}


def test_extras_and_named_packages_are_removed_from_requirements() -> None:
    listed = [
        "numpy", "torch==2.13.0+cpu; platform_machine == 'x86_64'", "pandas; extra == 'bench'",
        "six>=1; python_version < '3'", "mistral_common[image]>=1.11.6",
    ]  # fmt: skip
    assert needed(listed, ["torch"]) == ["numpy", "mistral_common[image]>=1.11.6"]
