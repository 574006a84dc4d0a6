"""A short run of every target; `make fuzz` runs a million cases of each."""

import json
from pathlib import Path

import pytest

from fuzz.run import TARGETS, main, run

pytestmark = pytest.mark.extended

CASES = 100


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_ends_with_an_expected_outcome(name: str) -> None:
    outcomes, error = run(name, 0, CASES)
    print(name, dict(outcomes))
    assert not error
    assert sum(outcomes.values()) == CASES
    assert len(outcomes) > 1, "every case has the same outcome: they show nothing"


@pytest.mark.timeout(600)
def test_without_names_every_target_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fuzz.run.STORE", tmp_path)
    assert main(["--cases", "3"]) == 0
    results = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [(one["target"], one["next"]) for one in results] == [(name, 3) for name in TARGETS]
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
