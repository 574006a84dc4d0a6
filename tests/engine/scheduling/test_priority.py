"""Priorities order the requests of one tenant and do not affect other tenants."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from builders.engine_kit import ask, fake_engine, run, tokens
from builders.job_kit import make_job, make_jobs

from pdserve.engine.api import Event, Finished, Request, Scheduled
from pdserve.engine.engine import Engine
from pdserve.engine.scheduling import EngineLimits, by_priority


def prioritized(request: Request, priority: int, tenant: bytes = b"") -> Request:
    return replace(request, priority=priority, tenant=tenant)


def keys(events: Sequence[Event], kind: type[Scheduled | Finished]) -> list[str]:
    return [event.key for event in events if isinstance(event, kind)]


def test_a_tenant_keeps_its_places_in_the_queue() -> None:
    rng = Random(1)
    for _ in range(200):
        entries = [
            (rng.choice("abc").encode(), rng.randrange(3), number)
            for number in range(rng.randrange(30))
        ]
        ordered = by_priority(entries, lambda entry: entry[0], lambda entry: entry[1])
        assert [tenant for tenant, *_ in ordered] == [tenant for tenant, *_ in entries]
        assert sorted(ordered) == sorted(entries)
        for tenant in {tenant for tenant, *_ in entries}:
            own = [entry for entry in ordered if entry[0] == tenant]
            assert own == sorted(own), "must be ordered by priority, then by arrival"


@pytest.mark.parametrize("prefill_only", [False, True])  # at decode and at prefill
def test_a_lower_value_is_scheduled_first_regardless_of_waiting_time(prefill_only: bool) -> None:
    now = [0.0]
    engine = fake_engine(max_running=1, chunk_size=4, clock=lambda: now[0])
    values = [0, 5, -5, 0, -5, 2**31 - 1, -(2**31)]
    for number, value in enumerate(values):
        prompt = [number] * 4 * (1 + number % 3)
        request = ask(str(number), prompt, max_tokens=2, prefill_only=prefill_only)
        engine.submit(prioritized(request, value))
        now[0] += 10.0 - number  # the first ones have waited long
    events: list[Event] = []
    while len(keys(events, Scheduled)) < len(values):
        step = engine.step()
        assert step is not None
        events += step.events
        for key in list(engine.jobs.held):
            engine.release_held(key)
    run(engine)
    for key in list(engine.jobs.held):
        engine.release_held(key)
    order = [values[int(key)] for key in keys(events, Scheduled)]
    assert order == sorted(values)


def test_a_tenant_gains_nothing_from_its_priorities() -> None:
    """The other tenant's requests run in the same steps, whatever priorities the first one sets."""
    hits = 0
    for seed in range(20):
        runs = []
        for value in (0, -(2**31), 2**31 - 1):
            rng, now = Random(seed), [0.0]
            engine = fake_engine(max_running=3, shared_step_tokens=4, clock=lambda now=now: now[0])
            for number in range(24):
                tenant = rng.choice((b"a", b"b", b"b"))
                request = ask(f"{tenant.decode()} {number}", [number] * 8, max_tokens=3)
                engine.submit(prioritized(request, value if tenant == b"a" else 0, tenant))
            steps = []
            while (step := engine.step()) is not None:
                now[0] += 0.01
                steps.append(keys(step.events, Finished))
            runs.append(steps)
        assert runs[0] == runs[1] == runs[2]
        hits += len(runs[0])
    assert hits > 100


def test_the_highest_value_is_preempted_first_without_changing_answers() -> None:
    def answers(values: Sequence[int]) -> tuple[Engine, list[Event]]:
        engine = fake_engine(num_blocks=16, prefix_cache=False, max_running=4)
        requests = [ask(str(n), [n] * 8, max_tokens=30) for n in range(4)]
        pairs = zip(requests, values, strict=True)
        return engine, run(engine, *(prioritized(request, value) for request, value in pairs))

    alike, plain = answers([0, 0, 0, 0])
    assert alike.jobs.preemptions
    assert keys(plain, Finished)[0] == "0", "the oldest request must keep its blocks"
    for values in ([5, 0, 0, -1], [1, 2, 3, -9], [-1, 0, 9, 3]):
        engine, events = answers(values)
        assert engine.jobs.preemptions
        ended = [values[int(key)] for key in keys(events, Finished)]
        assert ended[0] == min(values)
        assert tokens(events) == tokens(plain)


def test_the_victim_belongs_to_the_tenant_of_the_youngest_request() -> None:
    limits = EngineLimits(8, 64, 4, 64, 8, 4)
    jobs = make_jobs(limits, 0)
    rows = [(b"a", 9), (b"b", 0), (b"b", 7), (b"b", 7), (b"b", -1)]
    for order, (tenant, priority) in enumerate(rows, 1):
        job = make_job(limits, str(order), order, (1, 2), tenant=tenant, priority=priority)
        jobs.add(job)
        assert jobs.admit(job) is not None
    victims = []
    while (victim := jobs.victim(set())) is not None:
        victims.append(victim.key)
        jobs.preempt(victim)
    assert victims == ["4", "3", "2", "5", "1"], (
        "b has the youngest request until all of b's are preempted"
    )


def nearly_full() -> Engine:
    """Return an engine with one running request and room for a few more tokens."""
    engine = fake_engine(num_blocks=16, prefix_cache=False)
    engine.submit(ask("runs", [1] * 40, max_tokens=20))
    while not (engine.jobs.running and engine.jobs.running[0].generated[0]):
        engine.step()
    return engine


def test_reservations_and_queued_requests_are_ordered_by_rank_within_a_tenant() -> None:
    hits: Counter[str] = Counter()
    for queued, tenant, reserving in ((0, b"", -1), (0, b"", 1), (5, b"other", -9)):
        engine = nearly_full()
        engine.submit(prioritized(ask("queued", [2] * 40), queued, tenant))
        engine.step()
        assert "queued" in engine.jobs.waiting, "must wait for blocks"
        reservation = engine.reserve(prioritized(ask("reserves", [3] * 8), reserving))
        first = not tenant and reserving < queued
        assert (reservation is not None) is first
        hits["first" if first else "after"] += 1
        if reservation is not None:
            engine.release(reservation)
        run(engine)
    assert hits == {"first": 1, "after": 2}


def test_a_refused_reservation_delays_only_requests_that_it_precedes() -> None:
    for value, runs in ((-1, True), (1, False)):
        engine = nearly_full()
        assert engine.reserve(ask("reserves", [3] * 40)) is None
        engine.submit(prioritized(ask("short", [4] * 4), value))
        step = engine.step()
        assert step is not None
        assert ("short" in keys(step.events, Scheduled)) is runs
        run(engine)
