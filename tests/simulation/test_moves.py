"""A decode worker drains while it generates, and a fault strikes while a request migrates."""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from simulation.run import Run, make
from simulation.scenario import TARGET, Ask, Fault, Scenario

STEPS = ("held", "sending", "claimed", "transferring", "complete", "moved")
# During a migration the source is the sender ("prefill") and the target the receiver ("decode").
FAULTS = (
    "SIGKILL prefill", "SIGKILL decode", "reset prefill-decode", "bit flip", "router restart",
)  # fmt: skip
MORE_FAULTS = (  # most lose the same as those above, by other means
    "client closes", "SIGTERM decode", "delay router-decode", "no blocks at decode",
    "SIGSTOP prefill", "SIGSTOP decode", "half-open prefill-decode", "reset router-decode",
    "one-way partition router-decode", "truncation", "late message",
)  # fmt: skip


def moving(seed: int, *more: Fault) -> Scenario:
    """Return a scenario with a local prompt and a long answer, during which its worker drains."""
    drawn = make(seed, "SIGTERM decode", "decoding")
    asks = tuple(
        replace(ask, n=1, max_tokens=30) if ask.name == TARGET else ask for ask in drawn.asks
    )
    drain = replace(drawn.faults[0], index=seed % 3)
    faults = (drain, *more)
    return replace(drawn, asks=asks, faults=faults, prefills=0, decodes=3, routers=1)


def run(scenario: Scenario) -> tuple[Run, Any]:
    simulated = Run(scenario)
    result = simulated.finish()
    assert not result.violations
    return simulated, result


def moves(simulated: Run) -> Any:
    (router,) = simulated.cluster.of("router")
    return router.process.service.core.dispatcher.migrations


def test_a_drain_migrates_running_requests_without_recomputation() -> None:
    done = tokens = 0
    for seed in range(12):
        simulated, result = run(moving(seed))
        assert set(result.answers.values()) == {"finished"}
        assert result.retries == 0
        request = simulated.scenario.asks
        assert result.computed <= sum(len(ask.prompt) for ask in request)
        counted = moves(simulated)
        assert not counted.failed
        done += counted.num_done
        tokens += counted.num_tokens
        for node in simulated.cluster.of("decode"):
            assert node.process.service.runtime.engine.stats().recomputed_tokens == 0
    assert done > 6
    assert tokens > 6 * 26


@pytest.mark.extended
@pytest.mark.parametrize("kind", [*FAULTS, *MORE_FAULTS])
def test_more_faults_during_a_migration_lose_or_change_no_token(kind: str) -> None:
    strike_in_each_step(kind, range(1, 5))


@pytest.mark.parametrize("kind", FAULTS)
def test_no_fault_during_a_migration_loses_or_changes_a_token(kind: str) -> None:
    strike_in_each_step(kind, range(1))


def strike_in_each_step(kind: str, seeds: range) -> None:
    hits: Counter[str] = Counter()
    for step in STEPS:
        if kind in ("bit flip", "truncation") and step not in ("transferring",):
            continue
        if kind == "SIGTERM decode" and step == "held":
            continue  # the source, which drains already
        if kind in ("reset prefill-decode", "half-open prefill-decode") and step in STEPS[:2]:
            continue  # the two are not connected yet
        for seed in seeds:
            fault = Fault(kind, step, TARGET, 0, seed)
            simulated, result = run(moving(10 * seed + len(step), fault))
            second = simulated.faults.strikes[1]
            hits[step] += second.hit
            wanted = {"left"} if kind == "client closes" and second.hit else {"finished"}
            answer = result.answers.pop(TARGET)
            assert answer in wanted | {"finished"}, (step, seed)
            assert set(result.answers.values()) <= {"finished"}, (step, seed)
    assert 2 * hits.total() >= len(hits) * len(seeds), hits


def test_a_worker_that_preempts_migrates_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.services.router.request.migrations.WINDOW_S", 0.06)
    monkeypatch.setattr("pdserve.services.router.request.migrations.MIN_WINDOWS", 1)
    done = preempted = 0
    for seed in range(8):
        rng = Random(seed)
        asks = tuple(
            Ask(
                name=f"r{number}",
                at_s=0.3 + 0.01 * number,
                prompt=tuple(rng.randrange(1, 64) for _ in range(rng.randint(6, 14))),
                max_tokens=rng.choice((4, 200, 200)),
                seed=rng.getrandbits(32),
            )
            for number in range(12)
        )
        simulated, result = run(Scenario(seed, asks, prefills=0, decodes=2, decode_blocks=64))
        assert set(result.answers.values()) == {"finished"}
        done += moves(simulated).num_done
        engines = [n.process.service.runtime.engine for n in simulated.cluster.of("decode")]
        preempted += sum(engine.stats().preemptions for engine in engines)
    assert preempted >= 2
    assert done >= 1
