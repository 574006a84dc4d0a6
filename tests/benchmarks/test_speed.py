"""The test for a slowdown of the engine since an earlier commit."""

from line9_speed import CHANCE, PAIRS, by_chance


def test_the_number_of_slower_pairs_beyond_chance() -> None:
    assert by_chance(0, PAIRS) == 1
    assert by_chance(8, PAIRS) >= CHANCE > by_chance(9, PAIRS)
    assert by_chance(5, 5) < CHANCE
