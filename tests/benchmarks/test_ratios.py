"""Ratios, their spread, and a row of the table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ratios import compared, digits, medians, ratios, spread

FIGURES = st.floats(1e-3, 1e6)


def test_ratios_are_taken_per_pair() -> None:
    assert ratios([10.0, 12.0], [5.0, 4.0]) == [2.0, 3.0]


@pytest.mark.parametrize(("ours", "theirs"), [([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [-1.0])])
def test_invalid_pairs_are_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError):
        ratios(ours, theirs)


def test_an_empty_list_has_no_spread() -> None:
    with pytest.raises(ValueError):
        spread([])


@given(st.lists(FIGURES, min_size=1))
def test_a_spread_encloses_every_value(values: list[float]) -> None:
    found = spread(values)
    assert found.least <= found.median <= found.greatest
    assert all(found.least <= value <= found.greatest for value in values)
    assert sum(v <= found.median for v in values) * 2 >= len(values)
    assert sum(v >= found.median for v in values) * 2 >= len(values)


@given(FIGURES)
def test_four_digits_are_kept(value: float) -> None:
    assert digits(value) == pytest.approx(value, rel=1e-3)


def test_a_row_has_the_median_of_its_ratios() -> None:
    # Drift of the machine affects both figures of a pair: the ratios stay 2, 2 and 1.
    row = compared([10.0, 100.0, 30.0], [5.0, 50.0, 30.0])
    assert row["ratio"] == {"min": 1.0, "median": 2.0, "max": 2.0}
    assert (row["ours"], row["theirs"], row["pairs"]) == (30.0, 30.0, 3)
    assert medians({"a": row}) == {"a": 2.0}
