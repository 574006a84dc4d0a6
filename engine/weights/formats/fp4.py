"""Formats of 4-bit floats with a shared scale (OCP MX, NVFP4)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.weights.bits import Bytes
from pdserve.engine.weights.by_gguf import gguf_format
from pdserve.engine.weights.format import BLOCKS, RawTensor

FORMATS = (gguf_format("MXFP4", 32, 17), gguf_format("NVFP4", 64, 36))


def mxfp4(codes: Bytes, exponents: NDArray[Any]) -> RawTensor:
    """A weight as MXFP4 blocks: `codes` uint8 [rows, bytes], the first in the low nibble;
    `exponents` uint8 [rows, groups of 32]. Raises ValueError if they do not fit together."""
    rows, groups = exponents.shape
    if codes.shape != (rows, groups * 16):
        raise ValueError(f"weight is {list(codes.shape)} bytes, its scale {[rows, groups]}")
    pairs = codes.reshape(rows, groups, 2, 8)  # of 16 values each; GGUF has one in each nibble
    levels = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(rows, groups, 2, 16)
    blocks = np.empty((rows, groups, 17), np.uint8)
    blocks[..., 0] = exponents
    blocks[..., 1:] = levels[:, :, 0] | levels[:, :, 1] << np.uint8(4)
    return RawTensor({BLOCKS: blocks.reshape(rows, -1)}, "MXFP4", (rows, groups * 32))
