"""Rope tables: growing a table does not change it, and frequency divisors implement llama3's
scaling."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdserve.engine.models.hf_config import read_rope
from pdserve.engine.models.rope import (
    ROPE_KINDS,
    RopeConfig,
    RopeTable,
    for_context,
    inverse_frequencies,
)

LLAMA3 = RopeConfig(5e5, 64, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


def test_a_grown_table_equals_one_made_at_full_size() -> None:
    rope = RopeConfig(1e4, 8, "yarn", 4.0, 512, attention_factor=1.2)
    grown, whole = RopeTable(rope, 9000), RopeTable(rope, 9000)
    first = grown.cos.copy()
    assert len(first) < 3000, "tables must start small"
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
    assert ((divisors > 1.01) & (divisors < 7.9)).any(), "no frequency is interpolated"
    factors = RopeConfig(5e5, 64, "factors", factors=tuple(divisors.tolist()))
    np.testing.assert_allclose(inverse_frequencies(factors), scaled, rtol=1e-6)


def test_every_rope_kind_has_frequencies(subtests: pytest.Subtests) -> None:
    for kind in ROPE_KINDS:
        with subtests.test(kind):
            factors = (1.0, 2.0, 3.0)
            rope = RopeConfig(1e4, 6, kind, 2.0, 100, factors=factors, long_factors=factors)
            frequencies = inverse_frequencies(for_context(rope, 200))
            assert frequencies.shape == (3,)
            assert (frequencies > 0).all()


BY_CONTEXT: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 4.0, 8.0, 16.0],
    },
}


def test_rope_kinds_that_depend_on_the_context_length(subtests: pytest.Subtests) -> None:
    """The frequencies equal those of transformers for a text that fills the context."""
    for context_len, kind in product((40, 64, 65, 256, 1024), BY_CONTEXT):
        with subtests.test(context_len=context_len, kind=kind):
            fields: dict[str, Any] = {
                "hidden_size": 32,
                "num_attention_heads": 4,
                "max_position_embeddings": 256,
                "rope_parameters": BY_CONTEXT[kind],
            }
            theirs, scale = ROPE_INIT_FUNCTIONS[kind](
                LlamaConfig(**fields), "cpu", seq_len=context_len
            )
            rope = read_rope(fields, 8)
            fixed = for_context(rope, context_len)
            np.testing.assert_allclose(inverse_frequencies(fixed), theirs.numpy(), rtol=2e-7)
            assert fixed.attention_factor == pytest.approx(scale)
            assert for_context(fixed, 17) == fixed, "must not depend on the context any more"
            table = RopeTable(rope, context_len)
            again = RopeTable(fixed, 17)
            assert np.array_equal(table.cos[:17], again.cos[:17])
