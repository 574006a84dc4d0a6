"""A short run of every target; `make fuzz` runs a million cases of each."""

import pytest

from fuzz.run import TARGETS, run

pytestmark = pytest.mark.extended

CASES = 100


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_ends_with_an_expected_outcome(name: str) -> None:
    outcomes, error = run(name, 0, CASES)
    print(name, dict(outcomes))
    assert not error
    assert sum(outcomes.values()) == CASES
    assert len(outcomes) > 1, "every case has the same outcome: they show nothing"
