"""Ratios, their spread, and the verdict on a row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ratios import Bound, digits, judged, medians, ratios, spread

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


def test_a_bound_may_be_lower_or_upper() -> None:
    more, less = Bound(1.8, 2.5), Bound(0.25, 0.1)
    assert more.held_by(1.8)
    assert not more.held_by(1.79)
    assert more.aim_reached_by(2.5)
    assert less.held_by(0.25)
    assert not less.held_by(0.26)
    assert not less.aim_reached_by(0.2)
    assert less.aim_reached_by(0.05)


def test_a_row_is_judged_by_the_median_of_its_ratios() -> None:
    # Drift of the machine affects both figures of a pair: the ratios stay 2, 2 and 1.
    row = judged(Bound(1.8, 2.5), [10.0, 100.0, 30.0], [5.0, 50.0, 30.0])
    assert row["ratio"] == {"min": 1.0, "median": 2.0, "max": 2.0}
    assert row["ok"] is True
    assert row["aim_reached"] is False
    assert (row["ours"], row["theirs"], row["pairs"]) == (30.0, 30.0, 3)
    assert medians({"a": row}) == {"a": 2.0}


def test_a_row_below_its_minimum_is_not_ok() -> None:
    assert judged(Bound(3, 5), [2.0], [1.0])["ok"] is False
