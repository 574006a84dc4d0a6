"""When the engine counts as slower than at an earlier commit."""

from line9_speed import CHANCE, PAIRS, by_chance


def test_how_many_slower_pairs_chance_does_not_explain() -> None:
    assert by_chance(0, PAIRS) == 1
    assert by_chance(8, PAIRS) >= CHANCE > by_chance(9, PAIRS)
    assert by_chance(5, 5) < CHANCE
