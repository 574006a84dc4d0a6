"""Model check of the hand-off: every interleaving in small runs, and eleven seeded bugs that it
must find.

`make modelcheck` covers the larger runs. See tests/support/oracles/handoff_model.
"""

from collections.abc import Iterator
from types import ModuleType

import pytest
from oracles.handoff_model import decode, faults, prefill, router
from oracles.handoff_model.bugs import BUGS, Bug
from oracles.handoff_model.check import Result, explore
from oracles.handoff_model.config import IN_TEST, Config
from oracles.handoff_model.rules import Rules

from pdserve.services.router.request import machine

MOVES_OF = (router, decode, prefill, faults)
# Runs with two requests take seconds each.
CONFIGS = [
    pytest.param(config, id=config.name, marks=[pytest.mark.extended] * (len(config.prompts) > 1))
    for config in IN_TEST
]


@pytest.fixture(scope="module")
def ran() -> list[Result]:
    """Results of the searches in this module that have finished."""
    return []


def describe(result: Result) -> str:
    return "\n".join([f"{result.config}: {result.violation}", *result.trace])


@pytest.mark.parametrize("config", CONFIGS)
def test_no_interleaving_loses_or_leaks(config: Config, ran: list[Result]) -> None:
    result = explore(config)
    print(f"{config.name}: {result.states} states, {result.transitions} transitions")
    assert result.complete, describe(result)
    assert result.ends > 0
    ran.append(result)


@pytest.mark.extended
def test_every_move_occurs_in_some_run(ran: list[Result]) -> None:
    """After the runs above, no event of the model is unreachable."""
    if len(ran) < len(IN_TEST):
        pytest.skip("not all runs were selected")
    known = {f"{m.__name__.rpartition('.')[2]} {f}" for m, f in moves()}
    assert set().union(*(result.happened for result in ran)) == known


def moves() -> Iterator[tuple[ModuleType, str]]:
    """Yield the names of all functions that a `moves` of the model yields."""
    for module in MOVES_OF:
        source = module.__loader__.get_source(module.__name__)
        for line in source.splitlines():
            words = line.split()
            if words[:1] == ["yield"] and words[1] != "from":
                yield module, words[1].rstrip(",")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_seeded_bug_is_found(bug: Bug) -> None:
    found = explore(bug.config, bug.rules, bug.breaks)
    print(describe(found))
    assert found.violation.startswith(bug.breaks)
    assert len(found.trace) > 5
    sound = explore(bug.config)
    assert sound.complete, describe(sound)


def test_the_model_and_the_product_use_the_same_router_machine() -> None:
    assert Rules().request_step is machine.step
