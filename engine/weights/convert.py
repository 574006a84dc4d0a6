"""Converts stored weights: from any format to plain numbers, and to GGUF blocks with the native
kernels, which write the same bytes on every machine.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.weights.format import (
    BLOCKS,
    CHUNK_VALUES,
    PLAIN,
    VALUES,
    BlockFormat,
    Floats,
    RawTensor,
    empty,
    row_runs,
    widened,
    write_rounded,
)
from pdserve.engine.weights.formats import formats
from pdserve.kernels import _native


def unpack(raw: RawTensor) -> Floats:
    """Return the values of a stored weight, float32 of raw.shape; a float32 weight is not copied.

    Raises KeyError for an unregistered format.
    """
    if raw.format in PLAIN:
        return widened(raw.parts[VALUES], raw.format)
    out = empty(raw.shape, "F32")
    unpack_into(raw, out, "F32")
    return out


def unpack_into(raw: RawTensor, out: NDArray[Any], format: str) -> None:
    """Write the values of a stored weight into `out`, of raw.shape, as plain numbers of `format`.
    Works on some rows at a time; each value is rounded once."""
    assert out.shape == raw.shape, (out.shape, raw.shape)
    order = None if raw.columns is None else np.argsort(raw.columns)
    for rows in row_runs(out.shape, CHUNK_VALUES):
        part = raw.rows(rows)
        if raw.format not in PLAIN:
            with np.errstate(all="ignore"):  # infinite values from a file's scales are not an error
                values: Any = formats()[raw.format].unpack(part)
        elif raw.format == "F64":
            values = part.parts[VALUES]
        else:
            values = widened(part.parts[VALUES], raw.format)
        if order is not None:
            values = values[..., order]
        write_rounded(values, out[rows], format)


def as_plain(raw: RawTensor, format: str) -> RawTensor:
    """Convert a stored weight to plain numbers of `format`; return the weight itself if it already
    has this format."""
    if raw.format == format:
        return raw
    out = empty(raw.shape, format)
    unpack_into(raw, out, format)
    return RawTensor({VALUES: out}, format, raw.shape)


VERSION = 2  # increment with any change of results
QUANTIZED = frozenset(_native.quantized_formats())


def quantized_bytes(shape: tuple[int, ...], format: str) -> int:
    """Return the size in bytes of a matrix, or a stack of matrices, in a format of QUANTIZED.
    Raises ValueError if a row is not a whole number of blocks."""
    assert format in QUANTIZED
    block_format = formats()[format]
    assert isinstance(block_format, BlockFormat)
    return math.prod(shape[:-1]) * block_format.row_bytes(shape[-1])


def quantized_empty(shape: tuple[int, ...], format: str) -> RawTensor:
    """Allocate a quantized matrix, or a stack of matrices, without contents. Raises ValueError if a
    row is not a whole number of blocks."""
    row_bytes = quantized_bytes(shape[-1:], format)
    return RawTensor({BLOCKS: np.empty((*shape[:-1], row_bytes), np.uint8)}, format, shape)


def quantize_into(raw: RawTensor, out: RawTensor) -> None:
    """Quantize the values of `raw` into the blocks of `out`, which has the same shape. Raises
    ValueError for a value that is not finite, or too large for the float16 scale of a block."""
    assert raw.shape == out.shape, (raw.shape, out.shape)
    for rows in row_runs(raw.shape, CHUNK_VALUES):
        _write(unpack(raw.rows(rows)), out.format, out.parts[BLOCKS][rows])


def _write(values: Floats, format: str, blocks: NDArray[np.uint8]) -> None:
    matrix = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
    if not _native.quantize_into(format, matrix, blocks.reshape(len(matrix), -1)):
        raise ValueError(f"a value is not finite, or too large for {format}")
