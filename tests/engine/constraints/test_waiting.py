"""Who waits for a grammar, and who does not: slow compilers, late masks, deadlines, wake-ups.

Over 400 lines: every way in which a grammar can be late, which share the slow compiler.
"""

import json
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_kit import ask, assert_at_rest, fake_engine, of, tokens
from eventually import wait_until
from grammar_kit import Maker, Runner, of_regex

from pdserve.engine.api.errors import QueueFull
from pdserve.engine.api.request import (
    ChoiceState,
    Event,
    Finished,
    Grammar,
    NewTokens,
    RequestFailed,
    Scheduled,
)
from pdserve.engine.constraints.grammars import follower, trial
from pdserve.engine.constraints.grammars.cache import NUM_THREADS, GrammarCache
from pdserve.engine.constraints.grammars.compile_queue import (
    MAX_QUEUED,
    MAX_QUEUED_OF_TENANT,
    Compilation,
    CompileQueue,
)
from pdserve.engine.constraints.grammars.compiled import CompiledGrammar, GrammarError
from pdserve.engine.constraints.grammars.mask_threads import NUM_THREADS as QUICK_THREADS
from pdserve.engine.constraints.grammars.mask_threads import MaskThreads
from pdserve.engine.constraints.grammars.trial import GrammarTrials
from pdserve.engine.constraints.request import COMPILE_S
from pdserve.engine.thread import EngineThread

PATTERN = of_regex("[A-D]{6}")
EOS = (62,)


class SlowCompiler(GrammarCache):
    """Compiles nothing before `opened` is set."""

    def __init__(self, *vocabulary: Any) -> None:
        super().__init__(*vocabulary)
        self.opened = threading.Event()
        self.num_begun = 0
        self.compiled: list[str] = []

    def _compile(self, source: str) -> CompiledGrammar:
        self.num_begun += 1
        self.opened.wait(60)
        self.compiled.append(source)
        return super()._compile(source)


@pytest.fixture
def compiler(folder: Path) -> Iterator[SlowCompiler]:
    made = SlowCompiler((folder / "tokenizer.json").read_bytes(), 64, EOS)
    yield made
    made.opened.set()
    made.close()


def test_others_go_on_while_a_grammar_is_compiled(compiler: SlowCompiler) -> None:
    engine = fake_engine(grammars=compiler)
    engine.submit(ask("bound", range(40), grammar=PATTERN, max_tokens=20))
    events: list[Event] = []
    engine.submit(ask("free", range(7), max_tokens=30))
    while (plan := engine.schedule()) is not None:
        events += engine.collect(engine.launch(plan)).events
    assert len(tokens(events)["free", 0]) == 30
    assert of(events, Finished, "free")
    assert not of(events, Scheduled, "bound")
    assert engine.has_work
    compiler.opened.set()
    events = Runner(engine).run()
    assert all(32 <= token <= 35 for token in tokens(events)["bound", 0])
    assert len(tokens(events)["bound", 0]) == 6
    engine.close()


def test_requests_that_wait_for_a_grammar_have_no_slots(compiler: SlowCompiler) -> None:
    engine = fake_engine(grammars=compiler, num_blocks=16)
    for i in range(engine.limits.max_running + 2):
        engine.submit(ask(f"bound{i}", range(40), i, grammar=of_number(i + 1), max_tokens=4))
    reserved = engine.reserve(ask("reserved", [1], grammar=PATTERN))  # no KV to send
    assert reserved is not None
    engine.commit(reserved)
    assert engine.step() is None
    engine.submit(ask("free", range(50), max_tokens=9))
    events: list[Event] = []
    while (step := engine.step()) is not None:
        events += step.events
    assert {e.key for e in events} == {"free"}
    assert len(tokens(events)["free", 0]) == 9
    assert engine.jobs.num_free_slots == engine.limits.max_running
    compiler.opened.set()
    assert len(of(Runner(engine).run(), Finished)) == engine.limits.max_running + 3
    assert_at_rest(engine)
    engine.close()


def test_an_idle_engine_is_woken_when_the_grammar_is_there(compiler: SlowCompiler) -> None:
    events: list[Event] = []
    engine = fake_engine(grammars=compiler)
    thread = EngineThread(engine, lambda step: events.extend(step.events))
    thread.start()
    thread.post(lambda engine: engine.submit(ask("r", range(9), grammar=PATTERN))).result()
    wait_until(lambda: compiler.num_begun == 1, "the compiler")
    assert not of(events, Scheduled)
    compiler.opened.set()
    wait_until(lambda: of(events, Finished), "the end")
    assert len(tokens(events)["r", 0]) == 6
    thread.close()


def test_a_compiler_that_takes_too_long_fails_the_request(compiler: SlowCompiler) -> None:
    now = [0.0]
    engine = fake_engine(grammars=compiler, clock=lambda: now[0])
    engine.submit(ask("r", range(9), grammar=PATTERN))
    events = Runner(engine).step()
    assert not of(events, RequestFailed)
    now[0] = COMPILE_S + 1
    (failed,) = of(Runner(engine).step(), RequestFailed)
    assert (failed.key, failed.param) == ("r", "")  # it may go on elsewhere
    assert "too long" in failed.message
    assert_at_rest(engine)
    # Nobody waits for a grammar that is not begun when its requests have failed.
    wait_until(lambda: compiler.num_begun == 1, "the thread")
    for i in range(2 * NUM_THREADS):
        engine.submit(ask(f"{i}", [1], grammar=of_number(i + 10)))
    now[0] *= 3
    Runner(engine).step()
    compiler.opened.set()
    wait_until(lambda: len(compiler.compiled) == compiler.num_begun, "those that were begun")
    assert compiler.num_begun == NUM_THREADS
    engine.close()


def test_a_request_that_leaves_while_its_grammar_is_compiled(compiler: SlowCompiler) -> None:
    engine = fake_engine(grammars=compiler)
    engine.submit(ask("r", range(9), grammar=PATTERN))
    engine.step()
    assert engine.abort("r")
    compiler.opened.set()
    Runner(engine).run()
    assert_at_rest(engine)
    engine.close()


class BrokenCompiler(GrammarCache):
    """Gives what is no GrammarError, for one source."""

    broken = of_regex("broken").source

    def compile(self, source: str, tenant: bytes = b"") -> Compilation:
        if source != self.broken:
            return super().compile(source, tenant)
        made = Compilation()
        made.set_exception(OSError("no more processes"))
        return made


def test_a_compiler_that_breaks_fails_its_request_alone(folder: Path) -> None:
    compiler = BrokenCompiler((folder / "tokenizer.json").read_bytes(), 64, EOS)
    compiler.compile(PATTERN.source).result(60)
    engine = fake_engine(grammars=compiler)
    reserved = engine.reserve(ask("reserved", [1], grammar=PATTERN))
    engine.submit(ask("before", range(9), grammar=PATTERN))
    engine.submit(ask("broken", range(9), grammar=Grammar(compiler.broken)))
    engine.submit(ask("after", range(9), grammar=PATTERN))
    engine.submit(ask("free", range(9)))
    events = Runner(engine).step()
    assert reserved is not None
    engine.commit(reserved)
    events += Runner(engine).run()
    (failed,) = of(events, RequestFailed)
    assert (failed.key, failed.param) == ("broken", "")
    assert {e.key for e in of(events, Finished)} == {"reserved", "before", "after", "free"}
    assert_at_rest(engine)
    engine.close()


@pytest.mark.parametrize("error", [OSError("no more processes"), SystemExit(1)])
def test_what_breaks_in_a_compilation_is_an_internal_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken(self: GrammarTrials, source: str) -> None:
        raise error

    compiler = GrammarCache((folder / "tokenizer.json").read_bytes(), 64, EOS)
    with monkeypatch.context() as patched:
        patched.setattr(GrammarTrials, "check", broken)
        engine = fake_engine(grammars=compiler)
        events = Runner(engine).run(ask("bound", range(9), grammar=PATTERN), ask("free", [1]))
    (failed,) = of(events, RequestFailed)
    assert (failed.key, failed.param) == ("bound", "")
    assert [e.key for e in of(events, Finished)] == ["free"]
    # Another attempt is made.
    assert of(Runner(engine).run(ask("bound", range(9), grammar=PATTERN)), Finished)
    engine.close()


def test_only_what_is_wrong_with_a_grammar_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCache((folder / "tokenizer.json").read_bytes(), 64, EOS)
    wrong = compiler.compile(of_regex("(").source)
    assert isinstance(wrong.exception(60), GrammarError)
    assert compiler.compile(of_regex("(").source) is wrong
    engine, error = fake_engine(grammars=compiler), wrong.exception()
    for key in ("a", "b", "c"):
        (failed,) = of(Runner(engine).run(ask(key, [1], grammar=of_regex("("))), RequestFailed)
        assert (failed.message, failed.param) == (str(error), "grammar")
    assert error is not None
    where = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert "has_begun" not in where  # nothing of the requests is kept with it
    with monkeypatch.context() as patched:
        patched.setattr(trial, "TRIAL_S", 0.0)
        late = compiler.compile(PATTERN.source)
        assert late.exception(60)
    assert compiler.compile(PATTERN.source).result(60)
    compiler.close()


def of_number(number: int) -> Grammar:
    return of_regex(f"[A-D]{{{number}}}")


def test_what_nobody_waits_for_is_not_compiled(compiler: SlowCompiler) -> None:
    engine = fake_engine(grammars=compiler)
    for round_ in range(4):  # more than may wait at a time
        for i in range(20):
            engine.submit(ask(f"{i}", [1], grammar=of_number(100 * round_ + i + 10)))
            engine.abort(f"{i}")
        engine.step()
    engine.submit(ask("wanted", [1], grammar=PATTERN))
    engine.submit(ask("leaves", [1], grammar=PATTERN))
    engine.abort("leaves")
    engine.step()
    compiler.opened.set()
    assert of(Runner(engine).run(), Finished, "wanted")
    assert len(compiler.compiled) <= NUM_THREADS + 1
    assert_at_rest(engine)
    engine.close()


def test_the_queue_of_grammars_is_bounded_and_fair(compiler: SlowCompiler) -> None:
    engine = fake_engine(grammars=compiler, max_waiting=1000)

    def submit(count: int, tenant: bytes, key: str) -> int:
        """How many were taken."""
        for i in range(count):
            asked = ask(f"{key}{i}", [1], grammar=of_number(len(engine.jobs.by_key) + 10))
            try:
                engine.submit(replace(asked, tenant=tenant))
            except QueueFull:
                return i
        return count

    assert submit(NUM_THREADS, b"one", "first") == NUM_THREADS
    wait_until(lambda: compiler.num_begun == NUM_THREADS, "all threads at work")
    assert submit(100, b"one", "one") == MAX_QUEUED_OF_TENANT
    assert submit(100, b"two", "two") == MAX_QUEUED - MAX_QUEUED_OF_TENANT
    assert submit(1, b"three", "three") == 0
    # What is compiled already needs no place, and neither does what is under way.
    again = engine.jobs.by_key["one0"].request.params.grammar
    engine.submit(ask("again", [1], grammar=again))
    engine.submit(ask("no grammar", [1]))
    engine.close()


def test_tenants_take_turns_at_the_compiler() -> None:
    queue = CompileQueue()
    made = {name: queue.add(name[:1].encode(), name) for name in ("a1", "a2", "a3", "b1", "c1")}
    queue.remove(made["c1"])
    queue.remove(made["a2"])
    assert made["c1"].cancelled()
    order = [taken[0] for taken in iter(queue.pop, None)]
    assert order == ["a1", "b1", "a3"]
    assert made["a1"].running()
    queue.remove(made["a1"])  # it is under way
    assert not made["a1"].cancelled()
    last = queue.add(b"a", "a4")
    queue.clear()
    assert last.cancelled()
    assert queue.pop() is None


def test_a_reservation_begins_to_compile_and_fails_after_its_commit(folder: Path) -> None:
    compiler = GrammarCache((folder / "tokenizer.json").read_bytes(), 64, EOS)
    engine = fake_engine(grammars=compiler)
    good, bad = (
        engine.reserve(ask(key, [1], grammar=grammar))  # no KV to send
        for key, grammar in (("good", PATTERN), ("bad", of_regex("(")))
    )
    assert good is not None
    assert bad is not None
    wait_until(lambda: compiler.compile(PATTERN.source).done(), "a grammar before its KV is here")
    engine.commit(good)
    engine.commit(bad)
    events = Runner(engine).run()
    assert len(tokens(events)["good", 0]) == 6
    assert [e.key for e in of(events, RequestFailed)] == ["bad"]
    assert_at_rest(engine)
    engine.close()


def test_late_masks_delay_nobody_else(engine_of: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(engine_of())
    asked = [
        ask("bound", range(5), 1, temperature=1.0, grammar=of_regex("[a-z]{8}")),
        ask("free", range(40), 2, temperature=1.0, max_tokens=60, ignore_eos=True),
    ]
    calm = tokens(runner.run(*asked))
    fill = follower.fill

    def slow(*args: Any) -> None:
        time.sleep(0.1)
        fill(*args)

    monkeypatch.setattr(follower, "fill", slow)
    asked[1] = ask("free", range(40), 2, temperature=1.0, max_tokens=200, ignore_eos=True)
    events = runner.run(*asked)
    found = tokens(events)
    assert found["bound", 0] == calm["bound", 0]
    assert found["free", 0][:60] == calm["free", 0]
    # Between two tokens of the bound choice the other one has had several.
    order = [e.key for e in of(events, NewTokens)]
    last = len(order) - 1 - order[::-1].index("bound")
    assert order[:last].count("free") > 2 * order.count("bound")


def test_a_mask_that_takes_far_too_long_fails_the_request(
    engine_of: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "MOST_S", 0.0)
    runner = Runner(engine_of())
    (failed,) = of(runner.run(ask("r", range(5), grammar=PATTERN)), RequestFailed)
    assert (failed.param, failed.message) == ("grammar", "the grammar takes too long")
    assert_at_rest(runner.engine)


AMBIGUOUS = Grammar(json.dumps({"grammars": [{"lark_grammar": 'start: e\ne: e e | "a" | "b"'}]}))


@pytest.mark.parametrize(("name", "number"), [("MOST_TOKEN_S", 0.0), ("SLOW_TOKEN_S", 0.0)])
def test_tokens_that_take_far_too_long_fail_the_request(
    engine_of: Maker, monkeypatch: pytest.MonkeyPatch, name: str, number: float
) -> None:
    runner = Runner(engine_of())
    asked = ask("r", range(5), grammar=of_regex("[a-z]{30}"), max_tokens=30)
    states = (ChoiceState(tuple(tokens(runner.run(asked))["r", 0][:10])),)
    monkeypatch.setattr(follower, name, number)
    resumed = ask("r", range(5), grammar=of_regex("[a-z]{30}"), max_tokens=30, choices=states)
    for request in (asked, resumed):
        (failed,) = of(runner.run(request), RequestFailed)
        assert (failed.param, failed.message) == ("grammar", "the grammar takes too long")
    assert_at_rest(runner.engine)


def test_an_ambiguous_grammar_takes_little_of_any_step(folder: Path) -> None:
    """It is ended before one token takes the engine's thread for long."""
    compiler = GrammarCache((folder / "tokenizer.json").read_bytes(), 259, (258,))
    compiled = compiler.compile(AMBIGUOUS.source).result(60)
    threads = MaskThreads()
    made = follower.GrammarFollower(AMBIGUOUS, compiled, [], 259, threads, lambda: None)
    took = []
    for token in [64, 65] * 400:
        threads.start()
        assert made.wait(time.perf_counter() + 30)
        started = time.thread_time()
        made.push(token)
        took.append(time.thread_time() - started)
        if made.failure is not None:
            break
    assert made.failure is not None
    assert made.failure.param == "grammar"
    assert max(took) < 2 * follower.MOST_TOKEN_S
    threads.close()
    compiler.close()


def test_a_long_resume_lets_others_run_and_is_no_slow_mask(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCache((folder / "tokenizer.json").read_bytes(), 259, (258,))
    grammar = of_regex("[a-z]*")
    compiled = compiler.compile(grammar.source).result(60)
    monkeypatch.setattr(follower, "HELD_S", 0.0)
    turns: list[float] = []
    monkeypatch.setattr(time, "sleep", turns.append)
    threads = MaskThreads()
    ids = [64] * 20_000
    made = follower.GrammarFollower(grammar, compiled, ids, 259, threads, lambda: None)
    threads.start()
    assert made.wait(time.perf_counter() + 60)
    assert made.failure is None
    assert not made.is_slow
    assert len(turns) >= len(ids) // 2
    threads.close()
    compiler.close()


@pytest.mark.parametrize("more", [0, 1])
def test_a_long_replay_takes_no_thread_of_the_quick_ones(folder: Path, more: int) -> None:
    """They are all busy: only a replay that is long is done."""
    compiler = GrammarCache((folder / "tokenizer.json").read_bytes(), 259, (258,))
    grammar = of_regex("[a-z]*")
    compiled = compiler.compile(grammar.source).result(60)
    threads, opened = MaskThreads(), threading.Event()
    busy = SimpleNamespace(is_slow=False, run=opened.wait)
    for _ in range(QUICK_THREADS):
        threads.add(busy, awaited=False)
    ids = [64] * (follower.LONG_REPLAY + more)
    made = follower.GrammarFollower(grammar, compiled, ids, 259, threads, lambda: None)
    threads.start()
    assert made.wait(time.perf_counter() + (60 if more else 0.5)) == bool(more)
    opened.set()
    assert made.wait(time.perf_counter() + 60)
    threads.close()
    compiler.close()


def test_a_mask_that_came_too_late_is_not_waited_for_again_soon(folder: Path) -> None:
    compiler = GrammarCache((folder / "tokenizer.json").read_bytes(), 259, (258,))
    grammar = of_regex("[a-z]*")
    compiled = compiler.compile(grammar.source).result(60)
    threads = MaskThreads()
    made = follower.GrammarFollower(grammar, compiled, [], 259, threads, lambda: None)
    assert not made.is_awaited
    threads.start()
    assert made.wait(time.perf_counter() + 60)
    made.push(64)
    assert made.is_awaited
    assert not made.wait(time.perf_counter())  # its thread has not begun
    unawaited = 0
    while not made.is_awaited or made.is_done:
        if not made.is_done:
            unawaited += 1
            threads.start()
            assert made.wait(time.perf_counter() + 60)
        else:
            made.push(64)
    assert unawaited == follower.PATIENCE
    threads.close()
    compiler.close()


class Blocked:
    """A mask that takes until `opened` is set."""

    def __init__(self, is_slow: bool, opened: threading.Event) -> None:
        self.is_slow = is_slow
        self.done = False
        self._opened = opened

    def run(self) -> None:
        self._opened.wait(60)
        self.done = True


def test_slow_masks_leave_threads_to_others() -> None:
    threads, closed, opened = MaskThreads(), threading.Event(), threading.Event()
    opened.set()
    slow = [Blocked(True, closed) for _ in range(20)]
    quick = [Blocked(False, opened) for _ in range(20)]
    for task in [*slow, *quick]:
        threads.add(task, awaited=not task.is_slow)
    threads.start()
    wait_until(lambda: all(task.done for task in quick), "the quick ones")
    assert not any(task.done for task in slow)
    closed.set()
    wait_until(lambda: all(task.done for task in slow), "the slow ones")
    threads.close()


def test_equal_grammars_are_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCache((folder / "tokenizer.json").read_bytes(), 64, EOS)
    futures = [compiler.compile(PATTERN.source) for _ in range(3)]
    assert len({id(future.result(60)) for future in futures}) == 1
    assert compiler.compile(of_regex("b").source).result(60) is not futures[0].result()
    monkeypatch.setattr("pdserve.engine.constraints.grammars.cache.MAX_KEPT", 1)
    compiler.compile(of_regex("c").source).result(60)
    assert compiler.compile(PATTERN.source) is not futures[0]
    compiler.close()
