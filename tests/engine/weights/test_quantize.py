"""Quantization: formats of 32 values equal the gguf package's byte for byte; those of 256 stay
within the error that their bits allow."""

from itertools import product

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from pdserve.engine.weights import (
    BLOCKS,
    VALUES,
    Floats,
    RawTensor,
    quantize_into,
    quantized_bytes,
    quantized_empty,
)
from pdserve.engine.weights.convert import QUANTIZED, unpack

BY_GGUF = sorted(name for name in QUANTIZED if not name.endswith("K"))
# Error of normally distributed values relative to their deviation: 1.05 times the measured one.
ERRORS = {"Q2_K": 0.297, "Q3_K": 0.152, "Q4_K": 0.0753, "Q5_K": 0.0378, "Q6_K": 0.0201}


# By relative noise and format: the maximum error of rows of nearly equal values, relative to the
# value.
NEARLY_EQUAL = {
    (0.001, "Q2_K"): 0.01, (0.001, "Q3_K"): 0.01, (0.001, "Q4_K"): 0.02, (0.001, "Q5_K"): 0.01,
    (0.001, "Q6_K"): 0.01, (0.01, "Q2_K"): 0.09, (0.01, "Q3_K"): 0.07, (0.01, "Q4_K"): 0.06,
    (0.01, "Q5_K"): 0.04, (0.01, "Q6_K"): 0.03,
}  # fmt: skip


def quantized(values: Floats, name: str) -> RawTensor:
    out = quantized_empty(values.shape, name)
    quantize_into(RawTensor({VALUES: values}, "F32", values.shape), out)
    return out


def random_values(*shape: int, scale: float = 0.02, seed: int = 0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def awkward() -> NDArray[np.float32]:
    """Return rows of 256 values: zeros, a single value, equal ones, one sign, tiny and large
    ones."""
    rows = np.zeros((12, 256), np.float32)
    rows[1, 7] = -3.5
    rows[2] = 0.25
    rows[3] = -0.25
    rows[4] = np.abs(random_values(256, seed=1))
    rows[5] = -rows[4]
    rows[6] = random_values(256, scale=1e-6, seed=2)
    rows[7] = random_values(256, scale=1e-25, seed=3)
    rows[8] = random_values(256, scale=1e4, seed=4)
    rows[9] = 65504
    rows[10, ::2] = 65504
    rows[10, 1::2] = -65504
    rows[11] = np.float32(1e-42)
    return rows


def test_formats_of_32_values_equal_those_of_the_gguf_package(subtests: pytest.Subtests) -> None:
    for name in BY_GGUF:
        with subtests.test(name):
            values = np.concatenate([random_values(61, 256), awkward()])
            with np.errstate(all="ignore"):  # meaningless levels
                expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
            # Where the scale rounds to 0 the levels are meaningless.
            meaning = np.abs(values).max(1) > 1e-20
            actual = quantized(values, name)
            assert meaning.sum() == len(values) - 3
            np.testing.assert_array_equal(actual.parts[BLOCKS][meaning], expected[meaning])
            assert not unpack(actual)[~meaning].any()


def test_the_error_of_formats_of_256_values(subtests: pytest.Subtests) -> None:
    for name in sorted(ERRORS):
        with subtests.test(name):
            values = random_values(64, 2048)
            error = unpack(quantized(values, name)) - values
            assert np.sqrt(np.mean(error**2)) <= ERRORS[name] * 0.02


def test_awkward_values(subtests: pytest.Subtests) -> None:
    for name in sorted(ERRORS):
        with subtests.test(name):
            values = awkward()
            found = unpack(quantized(values, name))
            assert np.isfinite(found).all()
            largest = np.abs(values).max(1)
            coarse = 0.35 if name == "Q2_K" else 0.2
            seen = largest > 1e-3
            assert (np.abs(found - values).max(1)[seen] <= coarse * largest[seen]).all()
            assert not found[0].any()
            for row in (2, 3):  # equal values have only the rounding error of their scales
                np.testing.assert_allclose(found[row], values[row], rtol=0.02)


def test_quantizing_again_changes_only_rounding(subtests: pytest.Subtests) -> None:
    for name in sorted(QUANTIZED):
        with subtests.test(name):
            once = unpack(quantized(random_values(8, 512), name))
            again = unpack(quantized(once, name))
            first = np.abs(random_values(8, 512) - once).mean()
            assert np.abs(again - once).mean() <= 0.5 * first


@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_rows_do_not_depend_on_each_other(name: str) -> None:
    """Results depend neither on the number of rows at a time nor on the storage format of the
    input."""
    values = random_values(3000, 256, seed=5)  # more than a chunk
    whole = quantized(values, name)
    for rows in (slice(0, 1), slice(1020, 1030), slice(2999, 3000)):
        alone = quantized(values[rows].copy(), name)
        np.testing.assert_array_equal(alone.parts[BLOCKS], whole.parts[BLOCKS][rows])
    halves = values.astype(np.float16)
    stored = RawTensor({VALUES: halves}, "F16", halves.shape)
    out = quantized_empty(halves.shape, name)
    quantize_into(stored, out)
    widened = quantized(halves.astype(np.float32), name)
    np.testing.assert_array_equal(out.parts[BLOCKS], widened.parts[BLOCKS])


def test_a_stack_is_quantized_row_by_row() -> None:
    values = random_values(5, 3, 256)
    stack = quantized(values, "Q4_K")
    assert stack.nbytes == quantized_bytes(values.shape, "Q4_K") == 5 * 3 * 144
    for n in range(5):
        alone = quantized(values[n], "Q4_K")
        np.testing.assert_array_equal(stack.matrix(n).parts[BLOCKS], alone.parts[BLOCKS])


def test_values_beyond_any_scale_are_refused(subtests: pytest.Subtests) -> None:
    for wrong, name in product((np.nan, np.inf, -np.inf, 65520.0, -1e30), sorted(QUANTIZED)):
        with subtests.test(wrong=wrong, name=name):
            values = random_values(2, 256)
            values[1, 255] = wrong
            with pytest.raises(ValueError, match=f"not finite, or too large for {name}"):
                quantized(values, name)


def test_a_row_must_be_a_whole_number_of_blocks(subtests: pytest.Subtests) -> None:
    for name in sorted(QUANTIZED):
        with (
            subtests.test(name),
            pytest.raises(ValueError, match=f"does not divide into {name} blocks"),
        ):
            quantized_empty((2, 250), name)


def test_nearly_equal_values_have_a_small_error(subtests: pytest.Subtests) -> None:
    """If all but a few levels are equal, no line can be fitted."""
    for (noise, name), value in product(NEARLY_EQUAL, (5.0, -5.0, 0.3, 100.0)):
        with subtests.test(noise=noise, name=name, value=value):
            values = value * (1 + random_values(500, 256, scale=noise))
            off = np.abs(unpack(quantized(values, name)) - values).max() / abs(value)
            assert off < NEARLY_EQUAL[noise, name]
