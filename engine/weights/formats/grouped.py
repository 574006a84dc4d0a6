"""Formats of 4- or 8-bit levels with one scale, and optionally a zero point, per group of a row.

The layouts of GPTQ, AWQ, FP8 and compressed-tensors files are converted to this form.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.weights.format import PLAIN, Bytes, Floats, Format, RawTensor, widened

CODES, SCALES, ZEROS, DIVISORS = "codes", "scales", "zeros", "divisors"
NAMES = {PLAIN[name]: name for name in ("F32", "F16", "BF16")}  # format by dtype of the scales


def _e4m3() -> Floats:
    """Return the value of each of the 256 bytes, read as an 8-bit float with 4 exponent and 3
    mantissa bits, without infinities."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    values = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    values[127] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


E4M3 = _e4m3()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class GroupedFormat(Format):
    """A format with one scale per group of a row's columns. Its parts are `codes` uint8 [rows,
    bytes], two 4-bit codes per byte with the first in the low nibble; `scales` [rows, groups] of
    float32, float16 or bfloat16 bits; and optionally, for integers, `zeros` uint8 [rows, groups].
    FP4 has 8-bit floats as scales, and `divisors` float32 [rows].

    A value is (level - zero) * scale; without `zeros`, the zero of integers is half their range.
    With divisors, a scale is first divided by the divisor of its row.
    """

    def __init__(self, name: str, bits: int, table: Floats | None) -> None:
        """Create a format of `bits`-bit codes. `table` holds the level of each code; None means
        that the code is the level."""
        self.name = name
        self.bits = bits
        self._table = table

    def unpack(self, raw: RawTensor) -> Floats:
        codes, scales = raw.parts[CODES], scales_of(raw)
        zeros = raw.parts.get(ZEROS)
        levels = self._levels(nibbles(codes) if self.bits == 4 else codes)
        groups = levels.reshape(*scales.shape, -1)
        if zeros is not None:
            groups -= zeros[..., None]
        elif self._table is None:
            groups -= np.float32(1 << self.bits >> 1)
        groups *= scales[..., None]
        return groups.reshape(raw.shape)

    def _levels(self, codes: Bytes) -> Floats:
        return codes.astype(np.float32) if self._table is None else self._table[codes]


INT4 = GroupedFormat("INT4", 4, None)
INT8 = GroupedFormat("INT8", 8, None)
FP8 = GroupedFormat("FP8", 8, E4M3)
FP4 = GroupedFormat("FP4", 4, E2M1)
FORMATS = (INT4, INT8, FP8, FP4)


def scales_of(raw: RawTensor) -> Floats:
    """Return the scale by which the values of each group are multiplied, float32 [..., rows,
    groups]."""
    stored = raw.parts[SCALES]
    if DIVISORS in raw.parts:
        scales: Floats = E4M3[stored] / raw.parts[DIVISORS][..., None]
        return scales
    return widened(stored, NAMES[stored.dtype])


def float4(codes: Bytes, scales: Bytes, divisor: np.float32) -> RawTensor:
    """Return the weight of 4-bit floats in groups of 16 (NVFP4) with these codes and scales. Raises
    ValueError if the shapes do not match."""
    shape = (codes.shape[0], codes.shape[1] * 2)
    if scales.shape != (shape[0], shape[1] // 16) or shape[1] % 16:
        raise ValueError(
            f"scales are {list(scales.shape)} for a weight of {list(shape)}: "
            "expected one per 16 columns of each row"
        )
    divisors = np.full(shape[0], divisor, np.float32)
    return RawTensor({CODES: codes, SCALES: scales, DIVISORS: divisors}, FP4.name, shape)


def grouped(
    format: GroupedFormat,
    codes: Bytes,
    scales: NDArray[Any],
    zeros: Bytes | None = None,
    columns: NDArray[np.int64] | None = None,
) -> RawTensor:
    """Return the weight of a grouped format with these parts. Raises ValueError if they do not
    match."""
    shape = (codes.shape[0], codes.shape[1] * 8 // format.bits)
    rows, groups = scales.shape
    if rows != shape[0] or groups < 1 or shape[1] % groups:
        raise ValueError(
            f"scales are {list(scales.shape)} for a weight of {list(shape)}: expected "
            f"{shape[0]} rows of groups that divide the columns evenly"
        )
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zeros {list(zeros.shape)} do not match scales {list(scales.shape)}")
    if scales.dtype not in NAMES:
        raise ValueError(f"scales are {scales.dtype}, expected one of {', '.join(NAMES.values())}")
    parts = {CODES: codes, SCALES: scales}
    if zeros is not None and (zeros != 1 << format.bits >> 1).any():
        parts[ZEROS] = zeros
    return RawTensor(parts, format.name, shape, columns)


def even_groups(per_group: NDArray[Any], group: int, cols: int) -> NDArray[Any]:
    """Expand values per group, [rows, ceil(cols / group)], whose last group may be shorter, to
    values for groups that divide `cols` evenly, [rows, n]. Raises ValueError if the groups do not
    add up to `cols` columns."""
    if -(-cols // group) != per_group.shape[1]:
        raise ValueError(
            f"{per_group.shape[1]} groups of {group} columns do not add up to {cols} columns"
        )
    width = math.gcd(group, cols)
    return per_group[:, np.arange(cols // width) * width // group]


def nibbles(packed: Bytes) -> Bytes:
    """Unpack 4-bit numbers: uint8 [..., n] to [..., 2 * n], the low nibble of each byte first."""
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)


def packed_nibbles(levels: Bytes) -> Bytes:
    """Pack 4-bit numbers, uint8 [..., 2 * n] of 0 to 15, to [..., n]; the inverse of `nibbles`."""
    return levels[..., 0::2] | levels[..., 1::2] << np.uint8(4)
