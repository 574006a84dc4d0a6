"""Grammars that explode, crash llguidance or are none: each is refused in time, and nobody dies."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from eventually import wait_until
from grammar_kit import of_regex
from llguidance import LLMatcher

from pdserve.engine.api.sampling_bounds import MAX_GRAMMAR_BYTES
from pdserve.engine.constraints.grammars.cache import GrammarCache
from pdserve.engine.constraints.grammars.compiled import GrammarError
from pdserve.engine.constraints.grammars.trial import GrammarTrials

LIMIT_S = 20.0  # a trial has 10, on a machine that does nothing else
PRIMES = (101, 103, 107, 109, 113, 127, 131)


@pytest.fixture(scope="module")
def tokenizer_json(folder: Path) -> bytes:
    return (folder / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def compiler(tokenizer_json: bytes) -> Iterator[GrammarCache]:
    made = GrammarCache(tokenizer_json, 259, (258,))
    yield made
    made.close()


def of_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def of_schema(schema: object) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema))  # type: ignore[arg-type]


def chain(count: int, sigil: str) -> str:
    """Rules (or tokens), each of the next one."""
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
    "optional letters": of_regex("a?" * 30000).source,  # half a minute
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


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_time(compiler: GrammarCache, name: str) -> None:
    source = HOSTILE[name]
    assert len(source) <= MAX_GRAMMAR_BYTES
    started = time.monotonic()
    with pytest.raises(GrammarError) as refused:
        compiler.compile(source).result(60)
    assert time.monotonic() - started < LIMIT_S
    assert str(refused.value)
    assert len(str(refused.value)) <= 1000
    compiler.compile(of_regex(f"after {name}").source).result(LIMIT_S)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "x",
        "{}",
        '{"grammars": []}',
        '{"grammars": [{}]}',
        '{"grammars": [{"json_schema": {"type": "nothing"}}]}',
        '{"grammars": [{"lark_grammar": "start: nowhere"}]}',
        "\0",
        of_regex("[").source,
    ],
)
def test_what_is_no_grammar_is_refused(compiler: GrammarCache, source: str) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(source).result(60)


def test_a_slow_trial_does_not_hold_up_another(compiler: GrammarCache) -> None:
    primes = of_schema({"allOf": [{"type": "integer", "multipleOf": p} for p in PRIMES[::-1]]})
    slow = compiler.compile(primes)
    compiler.compile(of_regex("quick").source).result(LIMIT_S)
    assert not slow.done()
    assert slow.exception(60)


def test_a_long_chain_that_is_harmless_passes(compiler: GrammarCache) -> None:
    compiler.compile(chain(1000, "R")).result(60)


def processes() -> list[psutil.Process]:
    """Those that try grammars for this one, but for the ones that wait to be noticed dead."""
    found = psutil.Process().children()
    return [p for p in found if p.status() != "zombie" and "trial_process" in str(p.cmdline())]


def passes(trials: GrammarTrials) -> bool:
    try:
        trials.check(of_regex("a").source)
    except GrammarError:
        return False
    return True


def test_the_process_is_started_again(tokenizer_json: bytes) -> None:
    others = processes()
    trials = GrammarTrials(tokenizer_json, 259, (258,))
    assert passes(trials)
    (first,) = set(processes()) - set(others)
    first.kill()
    wait_until(lambda: passes(trials), "another process")
    assert first not in processes()
    trials.close()
    assert set(processes()) == set(others)


def test_the_process_ends_with_its_owner(tokenizer_json: bytes) -> None:
    others = processes()
    trials = GrammarTrials(tokenizer_json, 259, (258,))
    assert passes(trials)
    assert len(processes()) == len(others) + 1
    del trials
    assert set(processes()) == set(others)


def test_a_tokenizer_that_cannot_be_used(tokenizer_json: bytes) -> None:
    for vocabulary in ((b"{}", 259, (258,)), (tokenizer_json, 259, ())):
        compiler = GrammarCache(*vocabulary)
        with pytest.raises(GrammarError, match="tokenizer of this model"):
            compiler.compile(of_regex("a").source).result(60)
        compiler.close()
