"""Limit on the time that the tokens of one step may take on the engine's thread, over all
requests."""

import threading
import time
from collections import Counter
from typing import Any

import pytest
from builders.engine_kit import ask, assert_at_rest, of, tokens
from builders.grammar_kit import Maker, Runner, of_regex

from pdserve.engine.api import ChoiceState, Event, Finished, FinishReason, NewTokens
from pdserve.engine.constraints import manager
from pdserve.engine.constraints.grammars import CompiledGrammar, matcher

SHORT = of_regex("[a-c]{2,4}[0-9]")  # the grammar or max_tokens ends it
N = 16
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 4}


def reasons(events: list[Event]) -> dict[tuple[str, int], FinishReason]:
    return {(e.key, e.choice): e.finish for e in of(events, NewTokens) if e.finish is not None}


def make_request(key: str, number: int, **options: Any) -> Any:
    return ask(key, range(5 + number), number, grammar=SHORT, **SAMPLED | options)


def test_tokens_beyond_the_budget_do_not_change_answers(
    engine_of: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread accepts only the first token of a step, and in some steps none."""
    requests = [make_request("n", 1, n=N - 3), *(make_request(f"r{i}", i) for i in range(3))]
    calm = Runner(engine_of()).run(*requests)
    assert set(reasons(calm).values()) == {FinishReason.STOP, FinishReason.LENGTH}
    for most_s in (0.0, -1.0):
        monkeypatch.setattr(matcher, "MAX_STEP_S", most_s)
        runner = Runner(engine_of())
        events = runner.run(*requests)
        assert tokens(events) == tokens(calm)
        assert reasons(events) == reasons(calm)
        assert len(of(events, Finished)) == len(requests)
        assert_at_rest(runner.engine)


def test_requests_beyond_the_budget_can_be_preempted_and_resumed(
    engine_of: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "MASK_WAIT_S", 30.0)  # every step has all rows, under any load
    pattern = of_regex("[a-f]{2}(-[0-9]{3,5}){6,9}!")
    requests = [ask(f"r{i}", range(1 + 5 * i), i, grammar=pattern, max_tokens=60) for i in range(N)]
    calm = Runner(engine_of(prefix_cache=False)).run(*requests)
    monkeypatch.setattr(matcher, "MAX_STEP_S", -1.0)
    small = Runner(engine_of(kv_tokens=160, prefix_cache=False))
    events = small.run(*requests)
    assert small.engine.stats().preemptions > 0
    assert (tokens(events), reasons(events)) == (tokens(calm), reasons(calm))
    whole = tuple(tokens(calm)["r3", 0])
    states = (ChoiceState(whole[:-1]),)
    resumed = ask("r", range(16), 3, grammar=pattern, max_tokens=len(whole), choices=states)
    events = small.run(resumed)
    assert tokens(events) == {("r", 0): [whole[-1]]}
    assert reasons(events) == {("r", 0): FinishReason.STOP}


class SlowTokens:
    """A matcher that takes a while for each token and counts the tokens accepted on the engine's
    thread."""

    def __init__(self, real: Any, counted: Counter[str], token_s: float) -> None:
        self._real = real
        self._counted = counted
        self._token_s = token_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def consume_token(self, token: int) -> bool:
        self._counted[threading.current_thread().name] += 1
        until = time.thread_time() + self._token_s
        while time.thread_time() < until:
            pass
        return bool(self._real.consume_token(token))


@pytest.mark.parametrize(
    "token_s",
    [
        0.8 * matcher.SLOW_TOKEN_S,
        pytest.param(1.1 * matcher.MAX_TOKEN_S, marks=pytest.mark.extended),
    ],
)
def test_many_slow_choices_take_little_time_of_any_step(
    engine_of: Maker, monkeypatch: pytest.MonkeyPatch, token_s: float
) -> None:
    """Holds whether or not they take so long that they fail."""
    counted: Counter[str] = Counter()
    make = CompiledGrammar.matcher
    monkeypatch.setattr(
        CompiledGrammar, "matcher", lambda grammar: SlowTokens(make(grammar), counted, token_s)
    )
    runner, own = Runner(engine_of()), threading.current_thread().name
    runner.engine.submit(make_request("n", 1, n=N))
    most = 0
    while runner.engine.has_work:
        before = counted[own]
        runner.step()
        most = max(most, counted[own] - before)
    assert 0 < most <= 1 + matcher.MAX_STEP_S / token_s
    assert counted.total() > most
    assert_at_rest(runner.engine)
