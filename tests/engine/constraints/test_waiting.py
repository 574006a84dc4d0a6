"""Which requests wait for a grammar to be compiled: order, deadlines and wake-ups."""

import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.engine_kit import ask, assert_at_rest, fake_engine, of, tokens
from builders.grammar_kit import Runner, of_regex
from fakes.late_device import AheadEngine
from systems.eventually import wait_until

from pdserve.engine.api import Event, Finished, Grammar, QueueFull, RequestFailed, Scheduled
from pdserve.engine.constraints.grammars import (
    CompiledGrammar,
    GrammarBackend,
    GrammarError,
    backend,
)
from pdserve.engine.constraints.grammars.backend import (
    MAX_QUEUED,
    MAX_QUEUED_OF_TENANT,
    NUM_THREADS,
    CompileSandbox,
)
from pdserve.engine.constraints.manager import COMPILE_S
from pdserve.engine.thread import EngineThread

PATTERN = of_regex("[A-D]{6}")
EOS = (62,)


class SlowCompiler(GrammarBackend):
    """A compiler that blocks until `opened` is set."""

    def __init__(self, *vocabulary: Any) -> None:
        super().__init__(*vocabulary)
        self.opened = threading.Event()
        self.begun: list[str] = []
        self.compiled: list[str] = []

    @property
    def num_begun(self) -> int:
        return len(self.begun)

    def _compile(self, source: str) -> CompiledGrammar:
        self.begun.append(source)
        self.opened.wait(60)
        self.compiled.append(source)
        return super()._compile(source)


@pytest.fixture
def compiler(folder: Path) -> Iterator[SlowCompiler]:
    made = SlowCompiler((folder / "tokenizer.json").read_bytes(), 64, EOS)
    yield made
    made.opened.set()
    made.close()


def test_other_requests_run_while_a_grammar_is_compiled(compiler: SlowCompiler) -> None:
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


def test_requests_that_wait_for_a_grammar_take_no_slots(compiler: SlowCompiler) -> None:
    engine = fake_engine(grammars=compiler, num_blocks=16)
    for i in range(engine.limits.max_running + 2):
        engine.submit(ask(f"bound{i}", range(40), i, grammar=of_number(i + 1), max_tokens=4))
    reserved = engine.reserve(ask("reserved", [1], grammar=PATTERN))  # needs no KV
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


def test_an_idle_engine_wakes_up_when_a_grammar_is_ready(compiler: SlowCompiler) -> None:
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


def test_a_compilation_that_takes_too_long_fails_the_request(compiler: SlowCompiler) -> None:
    now = [0.0]
    engine = fake_engine(grammars=compiler, clock=lambda: now[0])
    engine.submit(ask("r", range(9), grammar=PATTERN))
    events = Runner(engine).step()
    assert not of(events, RequestFailed)
    now[0] = COMPILE_S + 1
    (failed,) = of(Runner(engine).step(), RequestFailed)
    assert (failed.key, failed.param, failed.is_overload) == ("r", "", True)
    assert "to compile" in failed.message
    assert_at_rest(engine)
    # A grammar whose compilation has not begun is dropped when its requests have failed.
    wait_until(lambda: compiler.num_begun == 1, "the thread")
    for i in range(2 * NUM_THREADS):
        engine.submit(ask(f"{i}", [1], grammar=of_number(i + 10)))
    now[0] *= 3
    Runner(engine).step()
    compiler.opened.set()
    wait_until(lambda: len(compiler.compiled) == compiler.num_begun, "those that were begun")
    assert compiler.num_begun == NUM_THREADS
    engine.close()


def test_a_deadline_passes_while_steps_run_ahead(compiler: SlowCompiler) -> None:
    now = [0.0]
    engine = fake_engine(grammars=compiler, clock=lambda: now[0], ahead=True, max_running=1)
    assert isinstance(engine, AheadEngine)
    engine.submit(ask("runs", range(5), max_tokens=40))
    engine.submit(ask("waits", range(9), grammar=PATTERN))
    events: list[Event] = []
    for step in range(7):
        now[0] = COMPILE_S + 1 if step >= 4 else 0.0
        found = engine.step()
        assert found is not None
        events += found.events
    assert engine.sampling.ahead > 0
    assert [event.key for event in of(events, RequestFailed)] == ["waits"]
    assert not of(events, Finished)
    while (found := engine.step()) is not None:
        events += found.events
    assert len(tokens(events)["runs", 0]) == 40
    engine.close()


def test_a_request_may_be_aborted_while_its_grammar_is_compiled(compiler: SlowCompiler) -> None:
    engine = fake_engine(grammars=compiler)
    engine.submit(ask("r", range(9), grammar=PATTERN))
    engine.step()
    assert engine.abort("r")
    compiler.opened.set()
    Runner(engine).run()
    assert_at_rest(engine)
    engine.close()


class BrokenCompiler(GrammarBackend):
    """A compiler that raises an error other than GrammarError for one source."""

    broken = of_regex("broken").source

    def _compile(self, source: str) -> CompiledGrammar:
        if source == self.broken:
            raise OSError("no more processes")
        return super()._compile(source)


def test_an_error_in_the_compiler_fails_only_its_request(folder: Path) -> None:
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
def test_an_unexpected_error_in_a_compilation_is_an_internal_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken(self: CompileSandbox, source: str) -> None:
        raise error

    compiler = GrammarBackend((folder / "tokenizer.json").read_bytes(), 64, EOS)
    with monkeypatch.context() as patched:
        patched.setattr(CompileSandbox, "check", broken)
        engine = fake_engine(grammars=compiler)
        events = Runner(engine).run(ask("bound", range(9), grammar=PATTERN), ask("free", [1]))
    (failed,) = of(events, RequestFailed)
    assert (failed.key, failed.param) == ("bound", "")
    assert [e.key for e in of(events, Finished)] == ["free"]
    # The grammar is compiled again.
    assert of(Runner(engine).run(ask("bound", range(9), grammar=PATTERN)), Finished)
    engine.close()


def test_only_errors_of_the_grammar_are_cached(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarBackend((folder / "tokenizer.json").read_bytes(), 64, EOS)
    wrong = compiler.compile(of_regex("(").source)
    assert isinstance(wrong.exception(60), GrammarError)
    assert compiler.compile(of_regex("(").source) is wrong
    engine, error = fake_engine(grammars=compiler), wrong.exception()
    for key in ("a", "b", "c"):
        (failed,) = of(Runner(engine).run(ask(key, [1], grammar=of_regex("("))), RequestFailed)
        assert (failed.message, failed.param) == (str(error), "grammar")
    assert error is not None
    where = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert "poll" not in where  # the error keeps no frames of requests
    with monkeypatch.context() as patched:
        patched.setattr(backend, "CHECK_S", 0.0)
        late = compiler.compile(PATTERN.source)
        assert late.exception(60)
    assert compiler.compile(PATTERN.source).result(60)
    compiler.close()


def of_number(number: int) -> Grammar:
    return of_regex(f"[A-D]{{{number}}}")


def test_unneeded_grammars_are_not_compiled(compiler: SlowCompiler) -> None:
    engine = fake_engine(grammars=compiler)
    for round_ in range(4):  # exceeds the queue's limit
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
        """Submit `count` requests and return how many were accepted."""
        for i in range(count):
            request = ask(f"{key}{i}", [1], grammar=of_number(len(engine.jobs.by_key) + 10))
            try:
                engine.submit(replace(request, tenant=tenant))
            except QueueFull:
                return i
        return count

    assert submit(NUM_THREADS, b"one", "first") == NUM_THREADS
    wait_until(lambda: compiler.num_begun == NUM_THREADS, "all threads at work")
    assert submit(100, b"one", "one") == MAX_QUEUED_OF_TENANT
    assert submit(100, b"two", "two") == MAX_QUEUED - MAX_QUEUED_OF_TENANT
    assert submit(1, b"three", "three") == 0
    # Compiled grammars and compilations in progress need no place in the queue.
    again = engine.jobs.by_key["one0"].request.params.grammar
    engine.submit(ask("again", [1], grammar=again))
    engine.submit(ask("no grammar", [1]))
    engine.close()


def test_tenants_take_turns_at_the_compiler(compiler: SlowCompiler) -> None:
    busy = [compiler.compile(f"busy{i}", b"a") for i in range(NUM_THREADS)]
    wait_until(lambda: compiler.num_begun == NUM_THREADS, "all threads at work")
    names = ("a1", "a2", "a3", "b1", "c1")
    made = {name: compiler.compile(name, name[:1].encode()) for name in names}
    compiler.compile("a3", b"b")
    for name in ("c1", "a2", "a3"):
        compiler.release(made[name])
    compiler.release(busy[0])  # already being compiled
    assert [name for name in names if made[name].cancelled()] == ["a2", "c1"]
    assert busy[0].running()
    compiler.opened.set()
    for name in ("a1", "b1", "a3"):
        made[name].exception(60)
    assert compiler.begun[NUM_THREADS:] == ["a1", "b1", "a3"]
    compiler.opened.clear()
    last = [compiler.compile(f"last{i}", b"a") for i in range(NUM_THREADS + 1)]
    wait_until(lambda: compiler.num_begun == 2 * NUM_THREADS + 3, "all threads at work")
    compiler.close()
    assert [compilation.cancelled() for compilation in last] == [False] * NUM_THREADS + [True]


def test_released_grammars_leave_nothing_in_the_thread_pool(compiler: SlowCompiler) -> None:
    """While all threads are busy, requests that come and go take no memory."""
    for i in range(NUM_THREADS):
        compiler.compile(f"busy{i}")
    wait_until(lambda: compiler.num_begun == NUM_THREADS, "all threads at work")
    submitted: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ThreadPoolExecutor, "submit", lambda *args: submitted.append(args))
        for i in range(200):
            compiler.release(compiler.compile(f"r{i}"))
    assert not submitted


def test_a_reservation_starts_its_compilation_and_fails_after_its_commit(folder: Path) -> None:
    compiler = GrammarBackend((folder / "tokenizer.json").read_bytes(), 64, EOS)
    engine = fake_engine(grammars=compiler)
    good, bad = (
        engine.reserve(ask(key, [1], grammar=grammar))  # needs no KV
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


def test_equal_grammars_are_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarBackend((folder / "tokenizer.json").read_bytes(), 64, EOS)
    futures = [compiler.compile(PATTERN.source) for _ in range(3)]
    assert len({id(future.result(60)) for future in futures}) == 1
    assert compiler.compile(of_regex("b").source).result(60) is not futures[0].result()
    monkeypatch.setattr("pdserve.engine.constraints.grammars.backend.MAX_CACHED", 1)
    compiler.compile(of_regex("c").source).result(60)
    assert compiler.compile(PATTERN.source) is not futures[0]
    compiler.close()
