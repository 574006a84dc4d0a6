"""Single flight in a whole cluster: of equal prompts only one is computed, even if a process is
lost meanwhile."""

from random import Random

import pytest

from simulation.run import simulate
from simulation.scenario import BLOCK, TARGET, Ask, Fault, Scenario

TWINS = 6


def scenario(seed: int, length: int, fault: str = "", gateways: int = 1) -> Scenario:
    """Return a scenario with equal prompts, the target's first, one decode worker, and as many
    routers as gateways."""
    rng = Random(f"flight {seed}")
    prompt = tuple(rng.randrange(1, 64) for _ in range(length))
    asks = [Ask(TARGET, 0.3, prompt, 8, rng.getrandbits(32))]
    for number in range(TWINS):
        at_s = 0.3 + rng.uniform(0.0005, 0.008)
        gateway = number % gateways
        asks.append(Ask(f"twin{number}", at_s, prompt, 8, rng.getrandbits(32), gateway=gateway))
    faults = (Fault(fault, "followed", TARGET, 1, seed),) if fault else ()
    return Scenario(
        seed, tuple(asks), faults, gateways, gateways, prefills=2, decodes=1, decode_blocks=96
    )


@pytest.mark.parametrize("gateways", [1, 2])
@pytest.mark.parametrize("length", [40, 43])
def test_a_prompt_is_computed_once(length: int, gateways: int) -> None:
    for seed in range(4):
        result = simulate(scenario(seed, length, gateways=gateways))
        assert not result.violations
        assert set(result.answers.values()) == {"finished"}
        assert result.computed == length + TWINS * (length % BLOCK or 1)
        assert (result.retries, result.placed_again) == (0, 0)


@pytest.mark.parametrize("fault", ["client closes", "SIGKILL prefill", "SIGSTOP prefill"])
def test_a_lost_leader_costs_at_most_one_prefill(fault: str) -> None:
    placed_again = 0
    for seed in range(6):
        result = simulate(scenario(seed, 43, fault))
        assert not result.violations
        assert result.hits == [(fault, "followed")]
        answers = [answer for name, answer in result.answers.items() if name != TARGET]
        assert set(answers) == {"finished"}
        assert result.computed <= 2 * 43 + TWINS * (43 % BLOCK)
        placed_again += result.placed_again
    assert placed_again > TWINS, "too few leaders were lost while others waited"
