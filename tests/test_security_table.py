"""docs/security.md names tests that attack: each exists and is part of an ordinary run.

Checks the tests collected in a run of the whole suite; each worker of pytest-xdist collects all of
them. In a partial run it reads the test files instead.
"""

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/security.md"
HEAD = "| Attack | What stops it | Tests |\n|---|---|---|\n"
NAME = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
SKIPS = ("pytest.skip", "mark.skip", "importorskip")


def rows() -> dict[str, list[tuple[str, str]]]:
    """Return (file, test) of each attack."""
    table = PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines():
        attack, _, tests = line.strip("| ").split(" | ")
        found[attack] = NAME.findall(tests)
        assert len(found[attack]) == len(tests.split(", ")), attack
    return found


@cache
def defined(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions of a file by name."""
    nodes = ast.parse((ROOT / file).read_text(), file).body
    return {n.name: n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def may_skip(file: str, name: str) -> bool:
    """Return whether a test, or a fixture of its file that it uses, may skip."""
    function = defined(file)[name]
    used = [arg.arg for arg in function.args.args if arg.arg in defined(file)]
    says = any(word in ast.unparse(function) for word in SKIPS)
    return says or any(may_skip(file, fixture) for fixture in used if fixture != name)


# Options that leave tests out.
CHOOSING = ("keyword", "deselect", "lf", "ignore", "ignore_glob")


def is_whole(config: pytest.Config) -> bool:
    """Return whether a run collects every test that `make test` runs."""
    args = [Path(config.invocation_params.dir, arg.partition("::")[0]) for arg in config.args]
    everything = any(arg.resolve() in (ROOT, ROOT / "tests") for arg in args)
    chosen = any(config.getoption(option, None) for option in CHOOSING)
    return everything and not chosen


def test_every_attack_is_tested(request: pytest.FixtureRequest, subtests: pytest.Subtests) -> None:
    collected: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in request.session.items:
        file, _, name = item.nodeid.partition("::")
        collected.setdefault((file, name.partition("[")[0]), []).append(item)
    whole = is_whole(request.config)
    attacks = rows()
    assert len(attacks) > 25
    for attack, tests in attacks.items():
        with subtests.test(attack):
            assert tests, "no test makes this attack"
            for file, name in tests:
                assert name in defined(file), f"{file}::{name} does not exist"
                assert not may_skip(file, name), f"{file}::{name} may be skipped"
                items = collected.get((file, name), [])
                assert items or not whole, f"{file}::{name} was not collected"
                for item in items:
                    assert not list(item.iter_markers("skip")), item.nodeid
                    for mark in item.iter_markers("skipif"):
                        needs_root = "root" in mark.kwargs["reason"] and os.geteuid() != 0
                        assert needs_root or not any(mark.args), item.nodeid
