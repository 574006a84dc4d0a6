"""Extraction of numbers from packed blocks, in GGML's block layouts (ggml-common.h)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.weights.format import Floats

Bytes = NDArray[np.uint8]


def half(blocks: Bytes, offset: int) -> Floats:
    """Return the float16 at byte `offset` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def fields(packed: Bytes, width: int) -> Bytes:
    """Split uint8 [..., bytes] into `width`-bit fields, lowest first: [..., 8 / width, bytes]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    values: Bytes = (packed[..., None, :] >> shifts) & np.uint8((1 << width) - 1)
    return values


def signed(packed: NDArray[Any]) -> Floats:
    """Interpret bytes as int8; return float32 of the same shape."""
    return np.ascontiguousarray(packed).view(np.int8).astype(np.float32)


def floats(levels: NDArray[Any]) -> Floats:
    """Convert unsigned levels to float32 of the same shape."""
    return levels.astype(np.float32)


def flat(values: NDArray[Any]) -> Floats:
    """Reshape float32 [blocks, ...] to [blocks, values]."""
    rows: Floats = values.reshape(len(values), -1)
    return rows
