"""The model check of the hand-off: every interleaving in small runs, and eleven bugs it must find.

`make modelcheck` covers the larger runs. See tests/support/oracles/handoff_model.
"""

from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import pytest
from oracles.handoff_model import decode, faults, prefill, router
from oracles.handoff_model.bugs import BUGS, Bug
from oracles.handoff_model.check import Result, explore
from oracles.handoff_model.config import IN_TEST, Config
from oracles.handoff_model.rules import Rules

from pdserve.services.router.requests import machine

MOVES_OF = (router, decode, prefill, faults)
# Those of two requests take seconds each.
CONFIGS = [
    pytest.param(config, id=config.name, marks=[pytest.mark.extended] * (len(config.prompts) > 1))
    for config in IN_TEST
]


@pytest.fixture(scope="module")
def happened() -> Counter[str]:
    """Moves that the runs of this module have made, by name."""
    return Counter()


def told(result: Result) -> str:
    return "\n".join([f"{result.config}: {result.violation}", *result.trace])


@pytest.mark.parametrize("config", CONFIGS)
def test_no_interleaving_loses_or_leaks(config: Config, happened: Counter[str]) -> None:
    result = explore(config)
    print(f"{config.name}: {result.states} states, {result.transitions} transitions")
    assert result.complete, told(result)
    assert result.ends > 0
    happened.update(result.happened)


@pytest.mark.extended
def test_every_move_has_happened(happened: Counter[str]) -> None:
    """After the runs above: no event of the model is out of reach."""
    if not happened:
        pytest.skip("the runs were not selected")
    known = {f"{m.__name__.rpartition('.')[2]} {f}" for m, f in moves()}
    assert happened.keys() == known


def moves() -> Iterator[tuple[ModuleType, str]]:
    """The names of all functions that a `moves` of the model yields."""
    for module in MOVES_OF:
        source = module.__loader__.get_source(module.__name__)
        for line in source.splitlines():
            words = line.split()
            if words[:1] == ["yield"] and words[1] != "from":
                yield module, words[1].rstrip(",")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_seeded_bug_is_found(bug: Bug) -> None:
    found = explore(bug.config, bug.rules, bug.breaks)
    print(told(found))
    assert found.violation.startswith(bug.breaks)
    assert len(found.trace) > 5
    sound = explore(bug.config)
    assert sound.complete, told(sound)


def test_the_router_of_the_model_is_the_product_s_machine() -> None:
    assert Rules().request_step is machine.step
