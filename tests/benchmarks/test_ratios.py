"""Ratios, their spread and the verdict on a row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ratios import Bound, digits, judged, medians, ratios, spread

FIGURES = st.floats(1e-3, 1e6)


def test_pairs_are_divided_pair_by_pair() -> None:
    assert ratios([10.0, 12.0], [5.0, 4.0]) == [2.0, 3.0]


@pytest.mark.parametrize(("ours", "theirs"), [([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [-1.0])])
def test_what_is_no_pair_of_figures_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError):
        ratios(ours, theirs)


def test_no_values_have_no_spread() -> None:
    with pytest.raises(ValueError):
        spread([])


@given(st.lists(FIGURES, min_size=1))
def test_a_spread_holds_every_value(values: list[float]) -> None:
    found = spread(values)
    assert found.least <= found.median <= found.greatest
    assert all(found.least <= value <= found.greatest for value in values)
    assert sum(v <= found.median for v in values) * 2 >= len(values)
    assert sum(v >= found.median for v in values) * 2 >= len(values)


@given(FIGURES)
def test_digits_keep_four(value: float) -> None:
    assert digits(value) == pytest.approx(value, rel=1e-3)


def test_a_bound_is_met_from_above_or_from_below() -> None:
    more, less = Bound(1.8, 2.5), Bound(0.25, 0.1)
    assert more.held_by(1.8)
    assert not more.held_by(1.79)
    assert more.aim_reached_by(2.5)
    assert less.held_by(0.25)
    assert not less.held_by(0.26)
    assert not less.aim_reached_by(0.2)
    assert less.aim_reached_by(0.05)


def test_a_row_is_judged_by_the_median_of_its_ratios_not_by_the_ratio_of_medians() -> None:
    # Drift of the machine moves both of a pair: the ratios stay 2, 2 and 1.
    row = judged(Bound(1.8, 2.5), [10.0, 100.0, 30.0], [5.0, 50.0, 30.0])
    assert row["ratio"] == {"min": 1.0, "median": 2.0, "max": 2.0}
    assert row["ok"] is True
    assert row["aim_reached"] is False
    assert (row["ours"], row["theirs"], row["pairs"]) == (30.0, 30.0, 3)
    assert medians({"a": row}) == {"a": 2.0}


def test_a_row_below_its_minimum_is_not_ok() -> None:
    assert judged(Bound(3, 5), [2.0], [1.0])["ok"] is False
