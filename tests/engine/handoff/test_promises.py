"""Accounting of promised blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.handoff.incoming import Promises, promise_blocks


def test_a_promise_covers_the_prompt_and_a_block_per_choice(subtests: pytest.Subtests) -> None:
    for tokens, choices, blocks in ((1, 1, 2), (32, 1, 2), (33, 4, 6)):
        with subtests.test(tokens=tokens, choices=choices, blocks=blocks):
            assert promise_blocks(tokens, choices, 32) == blocks


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=40), st.integers(0, 5))
def test_promises_never_exceed_the_room(orders: list[tuple[int, bool]], running: int) -> None:
    promises, given_out = Promises(32), []
    for blocks, free_one in orders:
        alone = not running and not given_out
        if promises.offer(blocks, 100, running):
            given_out.append(blocks)
            assert alone or promises.blocks <= 100 - 2 * running
        else:
            assert promises.blocks + blocks > 100 - 2 * running
        if free_one and given_out:
            promises.give_back(given_out.pop())
        assert promises.blocks == sum(given_out)


def test_giving_back_too_much_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot give back"):
        Promises(32).give_back(1)
