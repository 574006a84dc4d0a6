"""The fault matrix in simulation: a sample that hits every eighth cell; runs replay exactly."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pdserve.services.common import lifecycle
from pdserve.services.common.stall_detector import FROZEN_S
from simulation.clock import Process
from simulation.faults import KINDS, cells
from simulation.phases import PHASES
from simulation.run import Run, make, simulate
from simulation.scenario import TARGET, Scenario, draw
from simulation.sweep import sweep

ROOT = Path(__file__).parents[2]
KNOWN = Path(__file__).parent / "regressions"
HOPS_S = 0.05  # from gateway to router and back
HANGS_LONG = 5  # a fault with this seed hangs for 30 s
MORE = 40  # tries for a cell that the first round missed


@pytest.mark.timeout(300)
def test_faults_in_a_sample_of_cells_lose_leak_or_change_nothing() -> None:
    """The sample is every eighth cell, plus all cells of kinds without one, and so covers all kinds
    of faults and all phases. `make simulate` hits the other cells."""
    known = cells()[1::8]
    left_out = {*KINDS} - {kind for kind, _ in known}
    known += [cell for cell in cells() if cell[0] in left_out]
    assert {kind for kind, _ in known} == set(KINDS)
    assert {phase for _, phase in known} == set(PHASES)
    tally = sweep(range(1, len(cells()), 8), jobs=2)
    for kind, phase in [cell for cell in known if not tally.hits[cell]]:
        for seed in range(1, MORE):
            result = simulate(make(seed, kind, phase))
            tally.hits.update(result.hits)
            if result.violations:
                tally.failed.append((seed, kind, phase, result.violations))
            if tally.hits[kind, phase]:
                break
    assert not tally.failed
    assert not [cell for cell in known if not tally.hits[cell]]
    # The faults took effect: attempts were retried, and not every client was answered.
    assert tally.retries > len(known) // 10
    assert tally.answers["DEADLINE_EXCEEDED"]
    assert tally.answers["left"]
    assert tally.answers["finished"] > 10 * tally.answers["DEADLINE_EXCEEDED"]


def test_without_faults_every_request_is_answered_exactly() -> None:
    for seed in range(5):
        scenario = draw(seed, "none", "admitted").without_faults()
        result = simulate(scenario)
        assert not result.violations
        assert set(result.answers.values()) == {"finished"}
        assert result.retries == 0


def test_phases_of_a_request_sum_to_the_time_to_first_token() -> None:
    """Covers lost attempts, hand-offs, queues and resumed answers."""
    seen: Counter[str] = Counter()
    for kind in ("SIGKILL prefill", "SIGKILL decode", "engine hangs decode", "no blocks at decode"):
        for phase in ("admitted", "transferring", "decoding"):
            for seed in range(3):
                run = Run(make(seed, kind, phase))
                assert not run.finish().violations
                for reply in run.cluster.replies.values():
                    phases = reply.finished.phases
                    parts = [phases.queue_s, phases.prefill_s, phases.transfer_s]
                    ttft_s = reply.first_at - reply.requested_at
                    passed_s = sum(parts) + phases.first_token_s
                    assert 0 <= ttft_s - passed_s < HOPS_S, (kind, phase, seed, reply.ask, phases)
                    assert min(*parts, phases.first_token_s) >= 0
                    retried = reply.ask.name == TARGET and run.faults.strikes[0].hit
                    seen["remote"] += reply.finished.remote
                    seen["queued"] += phases.queue_s > 0.2
                    seen["struck"] += retried
                    seen["resumed"] += retried and kind == "SIGKILL decode" and phase == "decoding"
                    seen["tokens where they arrived"] += reply.num_direct
    assert min(seen.values()) >= 3, seen


def test_requests_of_a_frozen_engine_continue_elsewhere() -> None:
    found_s = []
    for seed in range(4):
        scenario = replace(make(seed, "engine hangs decode", "decoding"), decodes=2, routers=1)
        run = Run(replace(scenario, faults=(replace(scenario.faults[0], seed=HANGS_LONG),)))
        result = run.finish()
        assert not result.violations
        assert set(result.answers.values()) == {"finished"}
        (strike,) = run.faults.strikes
        (router,) = run.cluster.of("router")
        dispatcher = router.process.service.core.dispatcher
        assert (strike.hit, dispatcher.num_frozen) == (True, 1)
        assert result.retries >= 1
        found_s.append(run.cluster.replies[TARGET].ended_at - strike.at_s)
    assert min(found_s) > FROZEN_S
    assert max(found_s) < 10.5, (
        "must take at most 10 s, plus half a second for the rest of the answer"
    )


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("SIGKILL decode", "decoding"),
        ("SIGSTOP prefill", "transferring"),
        ("router restart", "last"),
    ],
)
def test_a_seed_replays_exactly_in_another_process(kind: str, phase: str) -> None:
    """The replay starts from JSON and with another hash seed, which changes the order of sets of
    strings."""
    scenario = make(3, kind, phase)
    assert Scenario.from_json(scenario.to_json()) == scenario
    here = simulate(scenario)
    path = ROOT / "build" / f"replay-{os.getpid()}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(scenario.to_json())
    try:
        done = subprocess.run(
            [sys.executable, "-m", "simulation.run", "--scenario", str(path)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTHONHASHSEED": "7"},
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        path.unlink()
    there = json.loads(done.stdout)
    assert there == json.loads(json.dumps(asdict(here)))
    assert here.hits


def test_different_seeds_give_different_runs() -> None:
    digests = {simulate(make(s, "SIGKILL prefill", "computing")).digest for s in range(4)}
    assert len(digests) == 4


@pytest.mark.parametrize("path", sorted(KNOWN.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_regressions_pass(path: Path) -> None:
    scenario = Scenario.from_json(path.read_text())
    result = simulate(scenario)
    assert not result.violations
    assert result.hits or not scenario.faults


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_a_second_sigterm_ends_a_simulated_process_at_once(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation continues, and the process is restarted once rather than once per signal."""
    deaths: list[tuple[str, float]] = []
    kill = Process.kill

    def noted(process: Process) -> None:
        deaths.append((process.name, process.time()))
        kill(process)

    monkeypatch.setattr(Process, "kill", noted)
    monkeypatch.setattr(lifecycle, "ECHO_S", 0.0)  # both signals arrive together
    scenario = replace(make(3, f"SIGTERM {role}", "computing"), routers=1, prefills=1, decodes=1)
    took_s = []
    for times in (1, 2):
        deaths.clear()
        run = Run(replace(scenario, faults=scenario.faults * times))
        result = run.finish()
        assert not result.violations
        assert [strike.hit for strike in run.faults.strikes] == [True] * times
        (node,) = run.cluster.of(role)
        assert [name for name, _ in deaths] == [node.name]
        assert node.lives == 2
        took_s.append(deaths[0][1] - run.faults.strikes[0].at_s)
    drained_s, at_once_s = took_s
    assert at_once_s == 0.0 < drained_s


def test_a_deadline_falls_into_its_phase() -> None:
    scenario = make(2, "deadline", "decoding")
    assert scenario.ask(TARGET).timeout_s < 10
    result = simulate(scenario)
    assert result.answers[TARGET] == "DEADLINE_EXCEEDED"
    assert result.hits[0][0] == "deadline"
