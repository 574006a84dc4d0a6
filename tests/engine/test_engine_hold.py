"""Frozen requests run no steps and keep their blocks; they are then continued or released."""

from itertools import product

import pytest
from builders.engine_kit import ask, assert_at_rest, fake_engine, of, run, tokens

from pdserve.engine.api import ChoiceState, Event, Finished, FinishReason
from pdserve.engine.engine import Frozen


def test_a_held_request_continues_where_it_was(subtests: pytest.Subtests) -> None:
    for window, before in product((0, 10), (2, 5, 9)):
        with subtests.test(window=window, before=before):
            request = ask("r", range(20), temperature=1.0, max_tokens=12, logprobs=2, seed=3)
            whole = run(fake_engine(window=window), request)
            engine = fake_engine(window=window)
            engine.submit(request)
            events: list[Event] = []
            for _ in range(before):
                step = engine.step()
                assert step is not None
                events += step.events
            said = len(tokens(events)["r", 0])
            computed = 20 + said - 1
            assert engine.freeze("r") == Frozen(computed, 0)
            assert engine.freeze("r") is not None, "a request may be held twice"
            assert not engine.has_work
            assert (engine.stats().held, engine.stats().running) == (1, 0)
            assert sum(block != 0 for block in engine.held_blocks("r")[0]) == -(-computed // 4)
            events += run(engine, ask("other", range(30, 40)))
            assert engine.resume("r")
            assert not engine.resume("r")
            events += run(engine)
            assert tokens(events)["r", 0] == tokens(whole)["r", 0]
            assert len(of(events, Finished, "r")) == 1
            assert engine.stats().recomputed_tokens == 0
            assert_at_rest(engine)


def test_blocks_of_a_held_request_are_not_taken() -> None:
    """When other requests lack blocks, they wait or are preempted and parked ones are evicted, but
    not a held one."""
    engine = fake_engine(num_blocks=20)
    engine.submit(ask("r", range(30), max_tokens=40))
    for _ in range(3):
        engine.step()
    blocks = engine.held_blocks("r") if engine.freeze("r") else []
    engine.submit(ask("parked", range(8)))
    engine.step()
    engine.park("parked")
    events = run(engine, ask("a", range(20, 40), max_tokens=20), ask("b", range(24), max_tokens=20))
    assert engine.stats().preemptions > 0
    assert {e.key for e in of(events, Finished)} == {"a", "b"}
    assert engine.held_blocks("r") == blocks
    engine.resume("r")
    alone = run(fake_engine(), ask("r", range(30), max_tokens=40))
    assert tokens(run(engine))["r", 0] == tokens(alone)["r", 0][2:]
    assert engine.stats().recomputed_tokens > 0, "preempted requests must be recomputed"


def test_a_released_request_ends_without_an_event() -> None:
    engine = fake_engine()
    engine.submit(ask("r", range(20), max_tokens=40))
    for _ in range(4):
        engine.step()
    engine.freeze("r")
    engine.release_held("r")
    assert run(engine) == []
    assert_at_rest(engine)


def test_an_aborted_held_request_ends() -> None:
    engine = fake_engine()
    engine.submit(ask("r", range(20), max_tokens=40))
    for _ in range(4):
        engine.step()
    engine.freeze("r")
    engine.abort("r")
    (finished,) = of(run(engine), Finished)
    assert finished.key == "r"
    assert_at_rest(engine)


def test_only_a_request_with_one_running_sequence_can_be_held() -> None:
    engine = fake_engine()
    engine.submit(ask("long", range(60)))
    engine.submit(ask("two", range(8), n=2, max_tokens=20))
    engine.submit(ask("hidden", range(8), prefill_only=True))
    engine.submit(ask("waits", range(8)))
    assert [engine.freeze(key) for key in ("long", "two", "hidden", "waits", "none")] == [None] * 5
    for _ in range(3):
        engine.step()
    assert engine.freeze("two") is None
    engine.abort("two", (0,))
    assert engine.freeze("two") is not None, "a single choice remains"
    engine.resume("two")
    for key in ("long", "two", "hidden", "waits"):
        engine.abort(key)
    run(engine)
    assert_at_rest(engine)


def test_recomputed_tokens_are_counted() -> None:
    engine = fake_engine()
    said = tuple(tokens(run(engine, ask("r", range(20))))["r", 0])
    assert engine.stats().recomputed_tokens == 0
    other = fake_engine(prefix_cache=False)
    begun = (ChoiceState(said[:5]),)
    (end,) = [
        e.finish for e in run(other, ask("r", range(20), choices=begun)) if getattr(e, "finish", 0)
    ]
    assert end is FinishReason.LENGTH
    assert other.stats().recomputed_tokens == 4, "the fifth token is computed for the first time"
    assert other.stats().prompt_tokens == 20
