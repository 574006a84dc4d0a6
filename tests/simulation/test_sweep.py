"""A sweep prints its seeds and resumes where it was interrupted."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from simulation import sweep
from simulation.run import Result
from simulation.sweep import Tally

RUNS = 2 * sweep.SLICE + 1


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Return the list of simulated seeds; the simulation is replaced by a stub."""
    seeds: list[int] = []

    def simulate(seed: int) -> Result:
        seeds.append(seed)
        hits = [sweep.planned(seed)]
        return Result([], hits, seed, 1.0, 2, {"target": "finished"}, 0, computed=0, placed_again=0)

    monkeypatch.setattr(sweep, "scenario_of", lambda seed: seed)
    monkeypatch.setattr(sweep, "simulate", simulate)
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    return seeds


def swept(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep", "--runs", str(RUNS), "--jobs", "1", *words])
    sweep.main()


def test_seeds_are_drawn_and_printed(
    ran: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = []
    for _ in range(2):
        ran.clear()
        swept(monkeypatch)
        found = re.search(r"^seeds from (\d+) on; again: (.*)$", capsys.readouterr().out, re.M)
        assert found is not None
        first, seeds = int(found[1]), list(ran)
        assert seeds == [*range(first, first + RUNS)]
        ran.clear()
        swept(monkeypatch, *found[2].split())
        capsys.readouterr()
        assert ran == seeds
        drawn.append(first)
    assert drawn[0] != drawn[1]


def test_an_interrupted_sweep_resumes(
    ran: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier results are reused only with --resume and unchanged sources."""
    words = ("--first", "5", "--resume")
    simulate = sweep.simulate

    def interrupted(seed: int) -> Result:
        if len(ran) == sweep.SLICE + 3:
            raise KeyboardInterrupt
        return simulate(seed)

    monkeypatch.setattr(sweep, "simulate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swept(monkeypatch, *words)
    monkeypatch.setattr(sweep, "simulate", simulate)
    ran.clear()
    swept(monkeypatch, *words)
    assert ran == [*range(5 + sweep.SLICE, 5 + RUNS)]
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["runs"], result["resumed"]) == (RUNS, sweep.SLICE)
    expected = Counter("/".join(sweep.planned(seed)) for seed in range(5, 5 + RUNS))
    assert Counter(result["hits_per_cell"]) == expected
    ran.clear()
    swept(monkeypatch, "--first", "5")
    assert len(ran) == RUNS
    ran.clear()
    monkeypatch.setattr(sweep, "_sources", lambda: "others")
    swept(monkeypatch, *words)
    assert len(ran) == RUNS


def test_a_tally_round_trips_through_json() -> None:
    tally = Tally(3, 1.5, 2.5, 7, 1)
    tally.hits.update([("SIGKILL decode", "last"), ("SIGKILL decode", "last")])
    tally.answers.update(["finished", "left"])
    tally.failed.append((17, "SIGKILL decode", "last", ["target: ids after the end"]))
    assert Tally.from_json(tally.to_json()) == tally
