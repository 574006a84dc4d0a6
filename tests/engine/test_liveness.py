"""The engine's liveness counter: a step that may take long counts as alive, a hung step does
not."""

from random import Random

import pytest
from builders.engine_kit import ask, fake_engine

from pdserve.engine.scheduling import StepMeter
from pdserve.engine.scheduling.stats import GROWTH
from pdserve.engine.thread import SLACK, LivenessCounter
from pdserve.services.common.stall_detector import FROZEN_S, MIN_LOOKS, StallDetector


def verdicts(liveness: LivenessCounter, start: float, end: float, every_s: float) -> list[float]:
    """Return the times at which an observer finds the engine frozen."""
    seen, found = StallDetector(), []
    for i in range(int((end - start) / every_s)):
        now = start + i * every_s
        if seen.look(liveness.read(now), True, now):
            found.append(now)
    return found


@pytest.mark.parametrize("every_s", [0.1, 0.5])
def test_a_hung_step_of_normal_size_is_detected_within_ten_seconds(every_s: float) -> None:
    liveness = LivenessCounter()
    liveness.beat(0.0, expected_s=0.15)  # a chunk of 100 ms with decode rows
    found = verdicts(liveness, 0.0, 30.0, every_s)
    assert FROZEN_S <= found[0] <= 10.0
    assert found == sorted(found)
    liveness.beat(30.0)
    assert not StallDetector(counter=liveness.read(29.9)).look(liveness.read(30.0), True, 30.0)


@pytest.mark.parametrize("every_s", [0.1, 0.5])
def test_a_chunk_that_takes_a_minute_is_not_frozen(every_s: float) -> None:
    liveness = LivenessCounter()
    liveness.beat(0.0, expected_s=60.0)
    assert not verdicts(liveness, 0.0, SLACK * 60.0, every_s)
    assert verdicts(liveness, 0.0, SLACK * 60.0 + 10.0, every_s), (
        "must count as frozen after its slack"
    )


def test_the_counter_never_decreases_and_every_turn_increments_it() -> None:
    rng = Random(3)
    liveness, now, last, moved_itself = LivenessCounter(), 0.0, 0, 0
    for _ in range(3000):
        now += rng.choice((0.001, 0.4, 1.7, 30.0))
        if rng.random() < 0.4:
            before = liveness.read(now)
            liveness.beat(now, rng.choice((0.0, 0.05, 3.0)))
            assert liveness.read(now) == before + 1
        moved_itself += liveness.read(now) > last
        assert liveness.read(now) >= last
        last = liveness.read(now)
    assert moved_itself > 300


def test_a_stopped_router_or_worker_does_not_count_as_a_frozen_engine() -> None:
    """After a SIGSTOP of a minute, heartbeats in transit are read late and in a burst."""
    seen = StallDetector()
    for beat in range(200):
        assert not seen.look(beat // 10, True, beat * 0.1)
    for beat in range(200, 800):  # sent meanwhile, read at once
        assert not seen.look(beat // 10, True, 80.0)
    assert not seen.look(79, True, 80.1), "a stopped worker sends no heartbeats meanwhile"
    assert MIN_LOOKS > 11


def test_without_work_no_progress_is_needed() -> None:
    seen = StallDetector()
    assert not any(seen.look(5, False, now * 0.1) for now in range(300))
    assert not any(seen.look(5, True, 30.0 + now * 0.1) for now in range(79))
    assert seen.look(5, True, 38.5)


def test_an_engine_estimates_the_duration_of_its_steps() -> None:
    clock = iter(range(0, 10_000, 2))  # each reading of the clock takes two seconds
    engine = fake_engine(
        chunk_size=64, max_running=4, num_blocks=256, clock=lambda: float(next(clock))
    )
    engine.submit(ask("a", range(48), max_tokens=3))
    while (plan := engine.schedule()) is not None:
        engine.collect(engine.launch(plan))
    engine.submit(ask("b", range(20, 60), max_tokens=3))
    plan = engine.schedule()
    assert plan is not None
    assert engine.expected_s(plan) == pytest.approx(2.0 + 40 * 2.0 / 48, rel=0.1)


def test_a_step_that_hung_does_not_change_the_estimate_of_the_next() -> None:
    meter = StepMeter()
    engine = fake_engine(max_running=4)
    engine.submit(ask("a", range(3), max_tokens=40))
    engine.step()
    plan = engine.schedule()
    assert plan is not None
    assert (plan.num_decode_rows, plan.num_tokens) == (1, 1)
    for wall_s in (0.05, 0.04, 60.0):
        meter.count(plan, wall_s)
    assert meter.expected_s(plan) <= GROWTH * 0.05
    for _ in range(100):
        meter.count(plan, 0.05)
    assert meter.expected_s(plan) == pytest.approx(0.05)
