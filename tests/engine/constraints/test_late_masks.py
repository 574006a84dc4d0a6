"""Slow masks and tokens: which requests they delay, and when their request fails."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders.engine_kit import ask, assert_at_rest, of, tokens
from builders.grammar_kit import Maker, Runner, of_regex
from systems.eventually import wait_until

from pdserve.engine.api import ChoiceState, Grammar, NewTokens, RequestFailed
from pdserve.engine.constraints.grammars import (
    GrammarBackend,
    GrammarMatcher,
    MaskThreads,
    StepBudget,
    matcher,
)
from pdserve.engine.constraints.grammars.threads import NUM_THREADS

PATTERN = of_regex("[A-D]{6}")
LETTERS = of_regex("[a-z]*")


@pytest.fixture(scope="module")
def backend_of_tiny(folder: Path) -> Iterator[GrammarBackend]:
    made = GrammarBackend((folder / "tokenizer.json").read_bytes(), 259, (258,))
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[MaskThreads]:
    made = MaskThreads()
    yield made
    made.close()


MatcherMaker = Callable[..., GrammarMatcher]


@pytest.fixture
def matcher_of(backend_of_tiny: GrammarBackend, threads: MaskThreads) -> MatcherMaker:
    """Return a function that makes the matcher of a choice with some generated ids."""

    def make(
        grammar: Grammar = LETTERS,
        generated: list[int] | None = None,
        on_late: Callable[[], None] = lambda: None,
    ) -> GrammarMatcher:
        compiled = backend_of_tiny.compile(grammar.source).result(60)
        ids, budget = generated or [], StepBudget()
        return GrammarMatcher(grammar, compiled, ids, 259, b"", threads, budget, on_late)

    return make


def soon() -> float:
    return time.perf_counter() + 60


def test_late_masks_delay_no_other_request(
    engine_of: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(engine_of())
    requests = [
        ask("bound", range(5), 1, temperature=1.0, grammar=of_regex("[a-z]{8}")),
        ask("free", range(40), 2, temperature=1.0, max_tokens=60, ignore_eos=True),
    ]
    calm = tokens(runner.run(*requests))
    fill = matcher.fill_bitmask

    def slow(*args: Any) -> None:
        time.sleep(0.1)
        fill(*args)

    monkeypatch.setattr(matcher, "fill_bitmask", slow)
    requests[1] = ask("free", range(40), 2, temperature=1.0, max_tokens=200, ignore_eos=True)
    events = runner.run(*requests)
    found = tokens(events)
    assert found["bound", 0] == calm["bound", 0]
    assert found["free", 0][:60] == calm["free", 0]
    # Between two tokens of the request with a grammar, the other request gets several.
    order = [e.key for e in of(events, NewTokens)]
    last = len(order) - 1 - order[::-1].index("bound")
    assert order[:last].count("free") > 2 * order.count("bound")


@pytest.mark.parametrize("n", [1, 2])
def test_a_mask_that_exceeds_the_time_limit_fails_the_request(
    engine_of: Maker, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr(matcher, "MAX_MASK_S", 0.0)
    runner = Runner(engine_of())
    (failed,) = of(runner.run(ask("r", range(5), n=n, grammar=PATTERN)), RequestFailed)
    assert (failed.param, failed.message) == ("grammar", "the grammar takes too long")
    assert_at_rest(runner.engine)


AMBIGUOUS = Grammar(json.dumps({"grammars": [{"lark_grammar": 'start: e\ne: e e | "a" | "b"'}]}))


@pytest.mark.parametrize(("name", "number"), [("MAX_TOKEN_S", 0.0), ("SLOW_TOKEN_S", 0.0)])
def test_tokens_that_exceed_the_time_limit_fail_the_request(
    engine_of: Maker, monkeypatch: pytest.MonkeyPatch, name: str, number: float
) -> None:
    runner = Runner(engine_of())
    plain = ask("r", range(5), grammar=of_regex("[a-z]{30}"), max_tokens=30)
    states = (ChoiceState(tuple(tokens(runner.run(plain))["r", 0][:10])),)
    monkeypatch.setattr(matcher, name, number)
    resumed = ask("r", range(5), grammar=of_regex("[a-z]{30}"), max_tokens=30, choices=states)
    two = ask("two", range(5), grammar=of_regex("[a-z]{30}"), max_tokens=30, n=2)
    for request in (plain, resumed, two):
        (failed,) = of(runner.run(request), RequestFailed)
        assert (failed.param, failed.message) == ("grammar", "the grammar takes too long")
    assert_at_rest(runner.engine)


def test_an_ambiguous_grammar_takes_little_of_any_step(
    matcher_of: MatcherMaker, threads: MaskThreads
) -> None:
    """The matcher fails before a single token occupies the engine's thread for long."""
    made = matcher_of(AMBIGUOUS)
    took = []
    for token in [64, 65] * 400:
        threads.start()
        assert made.wait(soon())
        started = time.thread_time()
        made.accept_token(token)
        took.append(time.thread_time() - started)
        if made.failure is not None:
            break
    assert made.failure is not None
    assert made.failure.param == "grammar"
    assert max(took) < 2 * matcher.MAX_TOKEN_S


def test_a_long_resume_lets_other_threads_run_and_is_not_a_slow_mask(
    matcher_of: MatcherMaker, threads: MaskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher, "REPLAY_SLICE_S", 0.0)
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    ids = [64] * 20_000
    made = matcher_of(generated=ids)
    threads.start()
    assert made.wait(soon())
    assert made.failure is None
    assert len(pauses) >= len(ids) // 2
    made.accept_token(64)
    assert made.is_awaited


@pytest.mark.parametrize("more", [0, 1])
def test_a_long_replay_does_not_need_a_quick_thread(
    matcher_of: MatcherMaker, threads: MaskThreads, more: int
) -> None:
    """All quick threads are busy; only a long replay completes."""
    opened = threading.Event()
    busy = SimpleNamespace(is_slow=False, run=opened.wait)
    for _ in range(NUM_THREADS):
        threads.add(busy, b"", awaited=False)
    made = matcher_of(generated=[64] * (matcher.LONG_REPLAY + more))
    threads.start()
    assert made.wait(time.perf_counter() + (60 if more else 0.5)) == bool(more)
    opened.set()
    assert made.wait(soon())


def count_unawaited(made: GrammarMatcher, threads: MaskThreads) -> int:
    """Return how many masks are computed without a waiting step, including the current one."""
    unawaited = 0
    while not made.is_awaited or made.is_ready:
        if not made.is_ready:
            unawaited += 1
            threads.start()
            assert made.wait(soon())
        else:
            made.accept_token(64)
    return unawaited


def test_after_a_late_mask_steps_do_not_wait_for_some_time(
    matcher_of: MatcherMaker, threads: MaskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, opened, fill = threading.Event(), threading.Event(), matcher.fill_bitmask
    opened.set()

    def slow(*args: Any) -> None:
        begun.set()
        assert opened.wait(60)
        fill(*args)

    monkeypatch.setattr(matcher, "fill_bitmask", slow)
    made = matcher_of()
    assert not made.is_awaited
    threads.start()
    assert made.wait(soon())
    opened.clear()
    begun.clear()
    made.accept_token(64)
    assert made.is_awaited
    threads.start()
    assert begun.wait(60)
    assert not made.wait(time.perf_counter())
    opened.set()
    assert count_unawaited(made, threads) == matcher.LATE_BACKOFF


def test_a_mask_that_had_no_thread_does_not_count_as_slow(
    matcher_of: MatcherMaker, threads: MaskThreads
) -> None:
    """Other tasks occupied the threads, so the grammar is not the slow part."""
    made = matcher_of()
    threads.start()
    assert made.wait(soon())
    made.accept_token(64)
    assert not made.wait(time.perf_counter())
    assert count_unawaited(made, threads) == 1


def test_the_completion_of_one_mask_is_not_taken_for_the_next(
    matcher_of: MatcherMaker, threads: MaskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread is delayed between the mask and the notification that follows it."""
    goes_on, called = threading.Event(), threading.Semaphore(0)

    notify = threads.notify

    def held_up() -> None:
        notify()
        assert goes_on.wait(60)

    monkeypatch.setattr(threads, "notify", held_up)
    monkeypatch.setattr(matcher, "SLOW_MASK_S", -1.0)
    made = matcher_of(on_late=called.release)
    threads.start()
    assert made.wait(soon())
    made.accept_token(64)  # no step waits for this mask either
    goes_on.set()
    assert called.acquire(timeout=60)
    assert not made.is_awaited
    threads.start()
    assert called.acquire(timeout=60)
    assert made.is_ready


class Blocked:
    """A mask task that runs until `opened` is set."""

    def __init__(self, is_slow: bool, opened: threading.Event) -> None:
        self.is_slow = is_slow
        self.done = False
        self._opened = opened

    def run(self) -> None:
        self._opened.wait(60)
        self.done = True


def test_slow_masks_leave_threads_for_others(threads: MaskThreads) -> None:
    closed, opened = threading.Event(), threading.Event()
    opened.set()
    slow = [Blocked(True, closed) for _ in range(20)]
    quick = [Blocked(False, opened) for _ in range(20)]
    for task in [*slow, *quick]:
        threads.add(task, b"", awaited=not task.is_slow)
    threads.start()
    wait_until(lambda: all(task.done for task in quick), "the quick ones")
    assert not any(task.done for task in slow)
    closed.set()
    wait_until(lambda: all(task.done for task in slow), "the slow ones")
