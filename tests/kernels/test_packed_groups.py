"""Packing of weights whose column groups share a scale: valid and refused inputs."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from pdserve.engine.weights.convert import unpack
from pdserve.engine.weights.formats import INT4
from pdserve.engine.weights.formats import SCALES as SCALE_PART
from pdserve.engine.weights.formats.grouped import grouped
from pdserve.kernels import _native
from pdserve.kernels.cpu import SCALES as SCALE_TYPES


@pytest.fixture(scope="module")
def context() -> _native.Context:
    return _native.Context(2)


def test_invalid_groups_raise(context: _native.Context) -> None:
    def pack(form: str, codes: Any, scales: Any, zeros: Any = None) -> None:
        raw = scales.view(np.uint8)
        _native.Matrix.pack_groups(context, form, codes, "F32", raw, zeros)

    codes, ones = np.zeros((3, 64), np.uint8), np.ones((3, 4), np.float32)
    pack("INT4", codes, ones)
    with pytest.raises(ValueError, match="no packed layout for groups of 'INT5'"):
        pack("INT5", codes, ones)
    pack("INT8", codes, ones)
    for form, groups in (("INT8", 8), ("INT4", 8)):
        with pytest.raises(ValueError, match="multiples of 32"):
            pack(form, codes, np.ones((3, groups), np.float32))
    with pytest.raises(ValueError, match="groups of 16 integers are an even number, without zeros"):
        pack("INT8", codes, ones, np.zeros((3, 4), np.uint8))
    with pytest.raises(ValueError, match="groups of 16 integers are an even number, without zeros"):
        pack("INT8", codes[:, :48].copy(), np.ones((3, 3), np.float32))
    with pytest.raises(ValueError, match="FP4, and no other, has E4M3 scales"):
        pack("FP4", codes, ones)
    with pytest.raises(ValueError, match="evenly"):
        pack("INT4", codes, np.ones((3, 5), np.float32))
    with pytest.raises(ValueError, match="evenly"):
        pack("INT4", codes, np.ones((3, 0), np.float32))
    with pytest.raises(ValueError, match="a row of codes"):
        pack("INT4", codes, np.ones((2, 4), np.float32))
    with pytest.raises(ValueError, match="one byte a scale"):
        pack("INT4", codes, ones, np.zeros((3, 3), np.uint8))
    with pytest.raises(ValueError, match="floats have no zeros"):
        pack("FP8", codes, ones, np.zeros((3, 4), np.uint8))
    for nan in (0x7F, 0xFF):
        with pytest.raises(ValueError, match="NaN"):
            pack("FP8", np.full((3, 64), nan, np.uint8), ones)
    with pytest.raises(ValueError, match="F16, BF16, F32 or E4M3"):
        _native.Matrix.pack_groups(context, "INT4", codes, "F64", codes)
    eighths = np.full((3, 8), 0x38, np.uint8)
    for scales, divisors, why in (
        (eighths, None, "FP4, and no other"),
        (eighths, np.ones(2, np.float32), "one number a row"),
        (eighths[:, 1:].copy(), np.ones(3, np.float32), "evenly"),
        (eighths[:, ::2].copy(), np.ones(3, np.float32), "are of 16 columns"),
        (eighths + 0x47, np.ones(3, np.float32), "NaN"),
        (eighths + 0xC7, np.ones(3, np.float32), "NaN"),
    ):
        with pytest.raises(ValueError, match=why):
            _native.Matrix.pack_groups(context, "FP4", codes, "E4M3", scales, None, divisors)
    with pytest.raises(ValueError, match="at least one"):
        _native.Matrix.pack_groups(context, "INT4", codes[:0], "F32", codes[:0])


def test_a_half_block_of_4_bit_floats_is_refused(context: _native.Context) -> None:
    codes, one = np.full((3, 24), 0x22, np.uint8), np.ones(3, np.float32)
    with pytest.raises(ValueError, match="an even number of them"):
        _native.Matrix.pack_groups(
            context, "FP4", codes, "E4M3", np.full((3, 3), 0x38, np.uint8), None, one
        )


def test_the_last_block_of_a_long_row_uses_its_group(context: _native.Context) -> None:
    """Holds as long as a multiplication can find the group of a block; longer rows are refused."""

    def pack(blocks: int, groups: int) -> _native.Matrix:
        codes = np.full((1, blocks * 32), 129, np.uint8)
        scales = np.arange(1, groups + 1, dtype=np.float32)[None]
        return _native.Matrix.pack_groups(context, "INT8", codes, "F32", scales.view(np.uint8))

    for blocks, groups in ((65535, 1), (65535, 3), (1 << 16, 2), (90_000, 3)):
        values = pack(blocks, groups).row_values(context, np.zeros(1, np.int64))[0]
        expected = np.repeat(np.arange(1.0, groups + 1), blocks * 32 // groups)
        np.testing.assert_array_equal(values, expected)
    with pytest.raises(ValueError, match="too long"):
        pack(65537, 1)


INFINITE = {"F16": (0x7C00, "<u2"), "BF16": (0x7F80, "<u2"), "F32": (0x7F800000, "<u4")}


def test_a_nonfinite_scale_is_refused(subtests: pytest.Subtests, context: _native.Context) -> None:
    for form, type in product(("INT4", "INT8", "FP8"), INFINITE):
        with subtests.test(form=form, type=type):
            infinity, dtype = INFINITE[type]
            sign = 1 << 15 if dtype == "<u2" else 1 << 31
            codes = np.zeros((40, 64), np.uint8)
            for bits in (infinity, infinity | sign, infinity + 1):  # +-infinity, NaN
                scales = np.zeros((40, 2), dtype)
                scales[-1, -1] = bits
                with pytest.raises(ValueError, match="a scale is infinite or NaN"):
                    _native.Matrix.pack_groups(context, form, codes, type, scales.view(np.uint8))


def test_scales_of_8_bit_floats_leave_weights_finite(context: _native.Context) -> None:
    codes = np.array([[0, 0x7E, 0xFE] * 16], np.uint8)  # 0, 448, -448

    def pack(scale: float) -> _native.Matrix:
        raw = np.array([[scale]], np.float32).view(np.uint8)
        return _native.Matrix.pack_groups(context, "FP8", codes, "F32", raw)

    matrix = pack(np.nextafter(np.float32(2**119), np.float32(0)))
    assert np.isfinite(matrix.row_values(context, np.zeros(1, np.int64))).all()
    x, out = np.zeros((1, 48), np.float32), np.empty((1, 1), np.float32)
    x[0, 1] = 0.5
    _native.linear_into(context, x, [matrix], out)
    assert 1e38 < out[0, 0] < np.inf
    for scale in (2.0**119, -(2.0**119), 2e36):
        with pytest.raises(ValueError, match=r"a scale of 8-bit floats is 2\^119 or more"):
            pack(scale)


def test_divisors_leave_weights_finite(context: _native.Context) -> None:
    codes = np.full((40, 16), 0x7F, np.uint8)  # 6 and -6
    scales = np.full((40, 2), 0x7E, np.uint8)  # 448

    def pack(divisor: float) -> _native.Matrix:
        divisors = np.ones(40, np.float32)
        divisors[-1] = divisor
        return _native.Matrix.pack_groups(context, "FP4", codes, "E4M3", scales, None, divisors)

    for divisor in (2.0**-116, 3e38):
        values = pack(divisor).row_values(context, np.array([39]))
        assert (np.isfinite(values) & (values != 0)).all()
    for divisor in (0.0, -1.0, 2.0**-117, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"a divisor is not finite or below 2\^-116"):
            pack(divisor)


def test_the_largest_scales_keep_their_values(
    subtests: pytest.Subtests, context: _native.Context
) -> None:
    for dtype in (np.float16, np.uint16, np.float32):
        with subtests.test(np.dtype(dtype).name):
            codes = np.full((1, 16), 0x89, np.uint8)
            zeros = np.full((1, 1), 8, np.uint8)
            largest = {np.uint16: np.array([0x7F00], np.uint16)}.get(dtype)
            scales = np.array([np.finfo(dtype).max]) if largest is None else largest
            raw = grouped(INT4, codes, scales.astype(dtype)[None], zeros + np.uint8(1))
            parts = {**raw.parts, SCALE_PART: raw.parts[SCALE_PART].view(np.uint8)}
            kind = SCALE_TYPES[np.dtype(dtype).name]
            matrix = _native.Matrix.pack_groups(context, "INT4", type=kind, **parts)
            values = matrix.row_values(context, np.zeros(1, np.int64))
            assert np.isfinite(values).all()
            np.testing.assert_array_equal(values, unpack(raw))
