"""Quantization to GGUF blocks with the native kernels: the same bytes on every machine."""

import math

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.weights.format import (
    BLOCKS,
    CHUNK_VALUES,
    BlockFormat,
    Floats,
    RawTensor,
    row_runs,
)
from pdserve.engine.weights.formats import formats
from pdserve.engine.weights.unpack import unpack
from pdserve.kernels import _native

VERSION = 2  # increment with any change of results
QUANTIZED = frozenset(_native.quantized_formats())


def quantized_bytes(shape: tuple[int, ...], format: str) -> int:
    """Return the bytes of a matrix or a stack of matrices in one of QUANTIZED. Raises ValueError if
    a row is not a whole number of blocks."""
    assert format in QUANTIZED
    block_format = formats()[format]
    assert isinstance(block_format, BlockFormat)
    return math.prod(shape[:-1]) * block_format.row_bytes(shape[-1])


def quantized_empty(shape: tuple[int, ...], format: str) -> RawTensor:
    """Allocate an uninitialized matrix or stack of matrices. Raises ValueError if a row is not a
    whole number of blocks."""
    row_bytes = quantized_bytes(shape[-1:], format)
    return RawTensor({BLOCKS: np.empty((*shape[:-1], row_bytes), np.uint8)}, format, shape)


def quantize_into(raw: RawTensor, out: RawTensor) -> None:
    """Write the values of `raw` into the blocks of `out`, of the same shape. Raises ValueError for
    a value that is not finite, or too large for a float16 scale."""
    assert raw.shape == out.shape, (raw.shape, out.shape)
    for rows in row_runs(raw.shape, CHUNK_VALUES):
        _write(unpack(raw.rows(rows)), out.format, out.parts[BLOCKS][rows])


def _write(values: Floats, format: str, blocks: NDArray[np.uint8]) -> None:
    matrix = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
    if not _native.quantize_into(format, matrix, blocks.reshape(len(matrix), -1)):
        raise ValueError(f"a value is not finite, or too large for {format}")
