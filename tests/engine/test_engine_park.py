"""Parked requests run no steps and keep their blocks until others lack them; then they continue."""

from itertools import product

import pytest
from builders.engine_kit import ask, assert_at_rest, fake_engine, of, run, tokens

from pdserve.engine.api import Event, Evicted, Finished, FinishReason, NewTokens, PrefillComputed
from pdserve.engine.engine import Engine


def steps(engine: Engine, count: int = 2000) -> list[Event]:
    events: list[Event] = []
    for _ in range(count):
        step = engine.step()
        if step is None:
            break
        events += step.events
    return events


def used(engine: Engine) -> int:
    return engine.stats().blocks.used


def test_a_parked_request_continues_where_it_was(subtests: pytest.Subtests) -> None:
    """After one step it is within the prompt of two chunks, after two at its first token, after
    five in decode."""
    for n, before in product((1, 3), (1, 2, 5)):
        with subtests.test(n=n, before=before):
            request = ask("r", range(20), n=n, temperature=1.0, max_tokens=12, logprobs=2, seed=3)
            whole = run(fake_engine(), request)
            engine = fake_engine()
            engine.submit(request)
            events = steps(engine, before)
            blocks, computed = used(engine), engine.stats().prompt_tokens
            assert engine.park("r")
            assert not engine.park("r")
            assert not engine.has_work
            assert engine.step() is None
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.parked) == (0, 0, 1)
            assert stats.blocks.used == blocks
            assert stats.parked_blocks >= blocks > 0

            events += run(engine, ask("other", range(30, 40)))  # takes the freed slots
            assert engine.unpark("r")
            assert not engine.unpark("r")
            events += steps(engine)
            found = tokens(events)
            assert all(found["r", c] == ids for (_, c), ids in tokens(whole).items())
            scores = [e.logprobs for e in of(events, NewTokens, "r")]
            assert sorted(map(str, scores)) == sorted(str(e.logprobs) for e in of(whole, NewTokens))
            assert len(of(events, Finished, "r")) == 1
            assert engine.stats().prompt_tokens - 10 == 20 >= computed, (
                "a prompt token was computed twice"
            )
            assert engine.stats().preemptions == 0
            assert_at_rest(engine)


def test_a_queued_request_is_parked_without_blocks() -> None:
    engine = fake_engine()
    engine.submit(ask("r", range(20)))
    assert engine.park("r")
    assert engine.step() is None
    assert engine.stats().parked_blocks == 0
    engine.unpark("r")
    assert len(of(steps(engine), Finished, "r")) == 1
    assert_at_rest(engine)


def test_unknown_and_reserved_requests_cannot_be_parked() -> None:
    engine = fake_engine()
    reservation = engine.reserve(ask("handed", range(20)))
    assert reservation is not None
    assert not engine.park("handed")
    assert not engine.park("nobody")
    engine.commit(reservation)
    assert engine.park("handed")
    engine.abort("handed")
    steps(engine)
    assert_at_rest(engine)


def parked_three(num_blocks: int) -> Engine:
    """Return an engine with three decoding requests of five or six blocks each, parked in the order
    c, a, b."""
    engine = fake_engine(num_blocks, prefix_cache=False)
    for number, key in enumerate("abc"):
        start = 20 * number
        engine.submit(ask(key, [(start + i) % 60 for i in range(19)], max_tokens=12))
    steps(engine, 4)
    assert engine.stats().running == 3
    for key in "cab":
        assert engine.park(key)
    return engine


def test_the_longest_parked_request_is_evicted_first_and_only_for_blocks() -> None:
    engine = parked_three(num_blocks=20)
    blocks = engine.stats().blocks
    assert blocks.free >= 2
    events = run(engine, ask("fits", range(3), max_tokens=2))
    assert not of(events, Evicted), "the request fits next to the parked ones"
    events = run(engine, ask("large", range(45), max_tokens=4))
    assert [e.key for e in of(events, Evicted)] == ["c", "a"]
    assert len(of(events, Finished, "large")) == 1
    assert engine.stats().preemptions == 0, (
        "parked requests must be evicted before running ones are preempted"
    )
    assert not engine.unpark("c")
    assert engine.unpark("b")
    assert len(of(steps(engine), Finished, "b")) == 1
    assert_at_rest(engine)


def test_a_growing_request_takes_parked_blocks_before_it_preempts() -> None:
    engine = fake_engine(13, prefix_cache=False)
    engine.submit(ask("old", range(19), max_tokens=12))
    engine.submit(ask("young", range(30, 49), max_tokens=12))
    steps(engine, 5)
    assert engine.park("old")
    events = run(engine, ask("more", range(3), max_tokens=8))
    events += steps(engine)
    assert [e.key for e in of(events, Evicted)] == ["old"]
    assert engine.stats().preemptions == 0
    assert {e.key for e in of(events, Finished)} == {"young", "more"}
    assert_at_rest(engine)


def test_a_reservation_takes_parked_blocks() -> None:
    engine = parked_three(num_blocks=20)
    reservation = engine.reserve(ask("handed", range(45)))
    assert reservation is not None
    assert [e.key for e in of(steps(engine), Evicted)] == ["c", "a"]
    engine.release(reservation)
    engine.abort("b")
    steps(engine)
    assert_at_rest(engine)


def test_aborting_a_parked_request_frees_blocks_at_once_and_ends_it_once() -> None:
    engine = parked_three(num_blocks=20)
    before = used(engine)
    assert engine.abort("a")
    assert used(engine) < before
    events = steps(engine)
    assert len(of(events, Finished, "a")) == 1
    assert [e.finish for e in of(events, NewTokens, "a")] == [FinishReason.ABORTED]
    for key in "bc":
        engine.abort(key)
    steps(engine)
    assert_at_rest(engine)


def test_single_choices_are_aborted_while_parked(subtests: pytest.Subtests) -> None:
    for before in (1, 4):
        with subtests.test(before=before):
            request = ask("r", range(20), n=3, temperature=1.0, seed=3)
            whole = tokens(run(fake_engine(), request))
            engine = fake_engine()
            engine.submit(request)
            events = steps(engine, before)
            engine.park("r")
            assert engine.abort("r", [1])
            events += steps(engine)
            assert engine.unpark("r")
            events += steps(engine)
            found = tokens(events)
            assert found["r", 0] == whole["r", 0]
            assert found["r", 2] == whole["r", 2]
            assert len(found["r", 1]) < len(whole["r", 1])
            assert len(of(events, Finished)) == 1
            assert_at_rest(engine)


def test_fail_all_does_not_affect_parked_requests() -> None:
    engine = parked_three(num_blocks=64)
    engine.unpark("a")
    engine.fail_all("broken")
    steps(engine)
    for key in "bc":
        assert engine.unpark(key)
    events = steps(engine)
    assert {e.key for e in of(events, Finished)} == {"b", "c"}
    assert not of(events, PrefillComputed), "their prompts were computed before parking"
    assert_at_rest(engine)
