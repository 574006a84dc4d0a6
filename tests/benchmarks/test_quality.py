"""Mismatches, their gaps, perplexity and windows."""

import math

import pytest
from model_quality import Mismatch, joined, mismatches, perplexity, windows

TOPS = [[(5, -0.1), (7, -2.5)], [(1, -0.5), (2, -1.0)], [(9, -0.2), (8, -3.0)]]


def test_a_mismatch_has_the_gap_between_both_ids_in_the_reference() -> None:
    assert mismatches(TOPS, [5, 2, 9]) == [Mismatch(1, 1, 2, 0.5, False)]


def test_an_id_outside_the_candidates_has_at_least_the_gap_to_the_last() -> None:
    assert mismatches(TOPS, [5, 1, 4]) == [Mismatch(2, 9, 4, 2.8, True)]


def test_a_different_number_of_positions_is_refused() -> None:
    with pytest.raises(ValueError):
        mismatches(TOPS, [5])


def test_perplexity_is_computed_from_the_mean() -> None:
    assert perplexity([math.log(2), math.log(8)]) == pytest.approx(4)
    assert math.isnan(perplexity([1.0, math.inf]))


def test_windows_are_complete_and_begin_with_bos() -> None:
    assert windows(range(10), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows(range(7), 4, [99]) == [[99, 0, 1, 2], [99, 3, 4, 5]]
    assert windows(range(6), 4, [99]) == [[99, 0, 1, 2], [99, 3, 4, 5]]
    assert windows(range(3), 4) == []


def test_parts_are_joined_in_order() -> None:
    assert joined([{"a": [1], "b": [2]}, {"a": [3], "b": [4]}]) == {"a": [1, 3], "b": [2, 4]}
