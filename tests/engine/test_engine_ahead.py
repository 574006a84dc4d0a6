"""A step is launched before the tokens of the previous one are read. The events equal those of an
engine without this, whatever happens to a request in between."""

import pytest
from builders.engine_kit import ask, assert_at_rest, fake_engine, of, run, tokens
from fakes.decoder import FakeDecoder, fake_spec, reference
from fakes.late_device import AheadEngine, LateSampling

from pdserve.engine.api import Event, Finished, FinishReason, NewTokens, Request, RequestFailed
from pdserve.engine.engine import Engine


def ahead_engine(**options: int) -> tuple[AheadEngine, LateSampling]:
    engine = fake_engine(ahead=True, **options)
    assert isinstance(engine, AheadEngine)
    return engine, engine.sampling


def greedy(count: int, prompt: range = range(5)) -> list[int]:
    return reference(list(prompt), fake_spec(), count)


def stepped(engine: Engine, count: int) -> list[Event]:
    events: list[Event] = []
    for _ in range(count):
        step = engine.step()
        assert step is not None
        events += step.events
    return events


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_equal_those_of_sequential_steps(temperature: float) -> None:
    def requests() -> list[Request]:
        return [
            ask(f"r{n}", range(n, n + 5 + n), n, temperature=temperature, max_tokens=6 + 3 * n, n=1)
            for n in range(6)
        ]

    engine, sampling = ahead_engine()
    events = run(engine, *requests())
    plain = run(fake_engine(ahead=False), *requests())
    assert tokens(events) == tokens(plain)
    assert len(of(events, Finished)) == 6
    assert sampling.ahead >= 15
    assert sampling.unread == 0
    assert_at_rest(engine)


def test_a_surplus_token_is_discarded() -> None:
    """The host reads the token that ends the choice while the next step already runs. Other rows of
    that step keep their tokens."""
    expected = greedy(12)
    stop = expected[6]
    assert stop not in expected[:6]
    engine, sampling = ahead_engine()
    stopped = ask("stops", range(5), max_tokens=12, stop_token_ids=[stop])
    events = run(engine, stopped, ask("goes on", range(5), max_tokens=12))
    found = tokens(events)
    assert found["stops", 0] == expected[:7]
    assert found["goes on", 0] == expected
    ends = [e.finish for e in of(events, NewTokens, "stops") if e.finish]
    assert ends == [FinishReason.STOP]
    assert sampling.ahead > 6
    assert_at_rest(engine)


def test_no_step_is_launched_for_tokens_beyond_the_last() -> None:
    engine, sampling = ahead_engine()
    run(engine, ask("r", range(5), max_tokens=9))
    assert engine.model.steps == 9  # one chunk, which gives the first token, and eight rows
    assert sampling.ahead == 8 - 1


@pytest.mark.parametrize("options", [{"logprobs": 2}, {"presence_penalty": 0.5}])
def test_a_step_that_needs_the_last_token_waits_for_it(options: dict[str, float]) -> None:
    engine, sampling = ahead_engine()
    run(engine, ask("r", range(5), **options))
    assert sampling.ahead == 0


@pytest.mark.parametrize(("leave", "come_back"), [("park", "unpark"), ("freeze", "resume")])
def test_a_request_that_leaves_the_batch_gets_no_token_of_a_step_in_flight(
    leave: str, come_back: str
) -> None:
    engine, _ = ahead_engine()
    engine.submit(ask("r", range(5), max_tokens=12))
    events = stepped(engine, 4)
    assert engine.ahead is not None
    assert getattr(engine, leave)("r")
    events += stepped(engine, 1)  # the step in flight
    assert tokens(events)["r", 0] == greedy(12)[:4]
    assert getattr(engine, come_back)("r")
    assert tokens(events + run(engine))["r", 0] == greedy(12)
    assert_at_rest(engine)


def test_an_aborted_request_gets_no_token_of_a_step_in_flight() -> None:
    engine, _ = ahead_engine()
    engine.submit(ask("r", range(5), max_tokens=12))
    before = stepped(engine, 4)
    assert engine.ahead is not None
    engine.abort("r")
    after = run(engine, ask("next", range(40), max_tokens=5))  # reuses its blocks
    assert tokens(before)["r", 0] == greedy(12)[:4]
    assert [e.ids for e in of(after, NewTokens, "r")] == [()]
    assert tokens(after)["next", 0] == greedy(5, range(40))
    assert_at_rest(engine)


def test_an_error_of_a_step_ahead_fails_requests_that_are_still_in_it() -> None:
    engine, sampling = ahead_engine()
    for key in ("held", "parked", "runs"):
        engine.submit(ask(key, range(5), max_tokens=12))
    stepped(engine, 3)
    sampling.error = "the device has failed"
    events = stepped(engine, 1)  # the launch of the next step fails
    assert engine.ahead is not None
    assert engine.freeze("held")
    assert engine.park("parked")
    sampling.error = ""
    events += stepped(engine, 1)
    assert {event.key for event in of(events, RequestFailed)} == {"runs"}
    assert engine.held_blocks("held")
    assert engine.resume("held")
    assert engine.unpark("parked")
    found = tokens(run(engine))
    assert all(found[key, 0] == greedy(12)[-len(found[key, 0]) :] for key in ("held", "parked"))
    assert_at_rest(engine)


def test_a_step_whose_tokens_are_not_read_is_waited_for() -> None:
    class Device(FakeDecoder):
        waited = 0

        def synchronize(self) -> None:
            self.waited += 1

    model = Device(fake_spec())
    engine = fake_engine(ahead=True, model=model, chunk_size=4)
    run(engine, ask("r", range(14), max_tokens=3))
    assert model.waited == model.kv_only_steps == 3


def test_waiting_requests_are_planned_after_the_tokens_are_known() -> None:
    engine, sampling = ahead_engine(max_running=2)
    requests = [ask(f"r{n}", range(5), max_tokens=4 + 2 * n) for n in range(5)]
    found = tokens(run(engine, *requests))
    assert [found[f"r{n}", 0] for n in range(5)] == [greedy(4 + 2 * n) for n in range(5)]
    assert sampling.ahead >= 5  # while both slots are taken


def test_blocks_run_out_while_a_step_is_in_flight() -> None:
    engine, sampling = ahead_engine(num_blocks=12)
    requests = [ask(f"r{n}", range(5), max_tokens=24) for n in range(3)]
    found = tokens(run(engine, *requests))
    assert all(found[f"r{n}", 0] == greedy(24) for n in range(3))
    assert engine.stats().preemptions > 0
    assert sampling.ahead > 10
    assert_at_rest(engine)
