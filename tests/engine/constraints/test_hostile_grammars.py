"""Grammars that grow exponentially, crash llguidance or are invalid: each is refused in time, and
no process of the engine dies."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from builders.grammar_kit import of_regex
from llguidance import LLMatcher
from systems.eventually import wait_until

from pdserve.engine.api import MAX_GRAMMAR_BYTES
from pdserve.engine.constraints.grammars import GrammarBackend, GrammarError, backend
from pdserve.engine.constraints.grammars.backend import CompileSandbox
from pdserve.engine.constraints.grammars.sandbox_process import answer_line

SLOW = of_regex("a?" * 30000).source
LIMIT_S = 20.0  # on an idle machine a fork has 10 s
PRIMES = (101, 103, 107, 109, 113, 127, 131)


@pytest.fixture(scope="module")
def tokenizer_json(folder: Path) -> bytes:
    return (folder / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def compiler(tokenizer_json: bytes) -> Iterator[GrammarBackend]:
    made = GrammarBackend(tokenizer_json, 259, (258,))
    yield made
    made.close()


def of_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def of_schema(schema: object) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema))  # type: ignore[arg-type]


def chain(count: int, sigil: str) -> str:
    """Return a grammar with a chain of rules (or tokens), each of which refers to the next."""
    rules = "\n".join(f"{sigil}{i}: {sigil}{i + 1}" for i in range(count))
    return of_lark(f'start: {sigil}0\n{rules}\n{sigil}{count}: "a"')


HOSTILE = {
    "rule chain": chain(3500, "r"),  # overflows the stack
    "refs in a circle": of_schema(
        {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % 1200}"} for i in range(1200)},
         "$ref": "#/$defs/d0"}
    ),
    "refs in a chain": of_schema(
        {"$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1200)}
         | {"d1200": {"type": "string"}}, "$ref": "#/$defs/d0"}
    ),
    "optional letters": SLOW,  # takes half a minute
    "many primes": of_schema({"allOf": [{"type": "integer", "multipleOf": p} for p in PRIMES]}),
    "doubling": of_lark(
        "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)) + '\nR60: "a"'
    ),
    "deep": of_lark("start: " + "(" * 20000 + '"a"' + ")" * 20000),
    "deep pattern": of_regex("(" * 15000 + "a" + ")" * 15000).source,
    "deep json": "[" * MAX_GRAMMAR_BYTES,
    "no end": of_lark("start: a\na: a"),
    "product": of_schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}}}
                              for j in range(10)]} for i in range(10)]}
    ),
}  # fmt: skip


# Runs until the limit of CPU time, as "many primes" does.
LONG = {"optional letters": pytest.mark.extended}


@pytest.mark.parametrize("name", [pytest.param(n, marks=LONG.get(n, ())) for n in HOSTILE])
def test_hostile_grammars_are_refused_in_time(compiler: GrammarBackend, name: str) -> None:
    source = HOSTILE[name]
    assert len(source) <= MAX_GRAMMAR_BYTES
    started = time.monotonic()
    with pytest.raises(GrammarError) as refused:
        compiler.compile(source).result(60)
    assert time.monotonic() - started < LIMIT_S
    assert str(refused.value)
    assert len(str(refused.value)) <= 1000
    compiler.compile(of_regex(f"after {name}").source).result(LIMIT_S)


def test_invalid_grammars_are_refused(subtests: pytest.Subtests, compiler: GrammarBackend) -> None:
    for source in (
        "",
        "x",
        "{}",
        '{"grammars": []}',
        '{"grammars": [{}]}',
        '{"grammars": [{"json_schema": {"type": "nothing"}}]}',
        '{"grammars": [{"lark_grammar": "start: nowhere"}]}',
        "\0",
        of_regex("[").source,
    ):
        with subtests.test(source=source), pytest.raises(GrammarError):
            compiler.compile(source).result(60)


def test_a_long_harmless_chain_is_accepted(compiler: GrammarBackend) -> None:
    compiler.compile(chain(1000, "R")).result(60)


def processes() -> list[psutil.Process]:
    """Return the sandboxes of this process, without those that are dead but not reaped."""
    found = psutil.Process().children()
    return [p for p in found if p.status() != "zombie" and "sandbox_process" in str(p.cmdline())]


def test_a_slow_compilation_does_not_delay_another(tokenizer_json: bytes) -> None:
    others = processes()
    compiler = GrammarBackend(tokenizer_json, 259, (258,))
    slow = compiler.compile(SLOW)
    (fork,) = wait_until(
        lambda: [fork for box in set(processes()) - set(others) for fork in box.children()],
        "the fork that compiles it",
    )
    fork.suspend()  # so the other one ends first, however busy the machine is
    compiler.compile(of_regex("quick").source).result(LIMIT_S)
    assert not slow.done()
    fork.kill()
    assert slow.exception(60)
    compiler.close()


def passes(box: CompileSandbox, source: str = of_regex("a").source) -> bool:
    try:
        box.check(source)
    except GrammarError:
        return False
    return True


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stop every sandbox process at its start, before it reads any input. Return the process
    ids."""
    start, ids = subprocess.Popen, []

    def start_stopped(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        os.kill(process.pid, signal.SIGSTOP)
        ids.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", start_stopped)
    return ids


def test_a_killed_sandbox_process_is_restarted(tokenizer_json: bytes) -> None:
    others = processes()
    box = CompileSandbox(tokenizer_json, 259, (258,))
    assert passes(box)
    (first,) = set(processes()) - set(others)
    first.kill()
    assert passes(box)  # uses a new process
    assert first not in processes()
    box.close()
    assert set(processes()) == set(others)


def test_the_sandbox_process_ends_with_its_owner(tokenizer_json: bytes) -> None:
    others = processes()
    box = CompileSandbox(tokenizer_json, 259, (258,))
    assert passes(box)
    assert len(processes()) == len(others) + 1
    del box
    assert set(processes()) == set(others)


def test_processes_that_end_at_once_are_an_internal_error(
    tokenizer_json: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    box = CompileSandbox(tokenizer_json + b" " * 3_000_000, 259, (258,))
    for _ in range(3):
        with pytest.raises(GrammarError, match="ended unexpectedly") as failed:
            box.check(of_regex("a").source)
        assert failed.value.is_internal
    box.close()


def test_a_process_that_does_not_read_blocks_no_caller(
    tokenizer_json: bytes, stopped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "CHECK_S", 1.0)
    box = CompileSandbox(tokenizer_json + b" " * 3_000_000, 259, (258,))
    with pytest.raises(GrammarError, match="in time") as failed:
        box.check(of_regex("a").source)
    assert failed.value.is_internal
    monkeypatch.setattr(backend, "CHECK_S", 60.0)
    errors: list[GrammarError] = []

    def ask() -> None:
        try:
            box.check(of_regex("a").source)
        except GrammarError as error:
            errors.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    wait_until(lambda: len(stopped) == 2, "the check to start a process")
    box.close()
    asker.join(20)
    assert [str(error) for error in errors] == ["the grammar sandbox is closed"]
    with pytest.raises(GrammarError, match="is closed"):
        box.check(of_regex("a").source)
    assert len(stopped) == 2
    assert not any(process.pid in stopped for process in processes())


def test_close_does_not_wait_for_a_compilation(tokenizer_json: bytes) -> None:
    box = CompileSandbox(tokenizer_json, 259, (258,))
    assert passes(box)
    slow = threading.Thread(target=lambda: passes(box, SLOW))
    slow.start()
    wait_until(lambda: any(p.children() for p in processes()), "a fork")
    started = time.monotonic()
    box.close()
    slow.join()
    assert time.monotonic() - started < 1.5


def test_an_answer_is_sent_in_one_write(subtests: pytest.Subtests) -> None:
    for text in ("é" * 5000, "😀" * 5000, '"' * 5000, "\0" * 5000, "short"):
        with subtests.test(text=text[:5]):
            line = answer_line(7, text)
            assert len(line) <= select.PIPE_BUF
            assert line.endswith(b"\n")
            answer = json.loads(line)
            assert answer["error"]
            assert text.startswith(answer["error"])
            assert (answer["id"], answer["is_late"]) == (7, False)


def test_an_unusable_tokenizer_is_an_error(tokenizer_json: bytes) -> None:
    for vocabulary in ((b"{}", 259, (258,)), (tokenizer_json, 259, ())):
        compiler = GrammarBackend(*vocabulary)
        with pytest.raises(GrammarError, match="tokenizer of this model"):
            compiler.compile(of_regex("a").source).result(60)
        compiler.close()
