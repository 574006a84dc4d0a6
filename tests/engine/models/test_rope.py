"""Rope tables: growth changes nothing, and divisors per frequency stand for llama3's scaling."""

import numpy as np
import pytest

from pdserve.engine.models.rope import ROPE_KINDS, RopeConfig, RopeTable, inverse_frequencies

LLAMA3 = RopeConfig(5e5, 64, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


def test_a_grown_table_equals_one_made_at_once() -> None:
    rope = RopeConfig(1e4, 8, "yarn", 4.0, 512, attention_factor=1.2)
    grown, whole = RopeTable(rope, 9000), RopeTable(rope, 9000)
    first = grown.cos.copy()
    assert len(first) < 3000, "tables start small"
    for num_positions in (5, 3000, 8999):
        grown.reserve(num_positions)
        assert num_positions <= len(grown.cos) <= 9000
    whole.reserve(9000)
    assert np.array_equal(grown.cos, whole.cos[: len(grown.cos)])
    assert np.array_equal(grown.sin, whole.sin[: len(grown.sin)])
    assert np.array_equal(grown.cos[: len(first)], first)
    assert grown.cos[0].tolist() == pytest.approx([1.2] * 4)


def test_factors_divide_the_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(5e5, 64))
    scaled = inverse_frequencies(LLAMA3)
    divisors = plain / scaled
    assert divisors.min() == 1
    assert divisors.max() == pytest.approx(8)
    assert ((divisors > 1.01) & (divisors < 7.9)).any(), "some are interpolated"
    factors = RopeConfig(5e5, 64, "factors", factors=tuple(divisors.tolist()))
    np.testing.assert_allclose(inverse_frequencies(factors), scaled, rtol=1e-6)


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_every_kind_has_frequencies(kind: str) -> None:
    rope = RopeConfig(1e4, 6, kind, 2.0, 100, factors=(1.0, 2.0, 3.0))
    frequencies = inverse_frequencies(rope)
    assert frequencies.shape == (3,)
    assert (frequencies > 0).all()
