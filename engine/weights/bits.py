"""Reading numbers out of packed blocks; block layouts are those of GGML (ggml-common.h)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.weights.format import Floats

Bytes = NDArray[np.uint8]


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def fields(packed: Bytes, width: int) -> Bytes:
    """Fields of `width` bits, lowest first: uint8 [..., bytes] -> [..., 8 / width, bytes]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    found: Bytes = (packed[..., None, :] >> shifts) & np.uint8((1 << width) - 1)
    return found


def signed(packed: NDArray[Any]) -> Floats:
    """The bytes as int8 numbers, float32 of the same shape."""
    return np.ascontiguousarray(packed).view(np.int8).astype(np.float32)


def floats(levels: NDArray[Any]) -> Floats:
    """The bytes as numbers from 0, float32 of the same shape."""
    return levels.astype(np.float32)


def flat(values: NDArray[Any]) -> Floats:
    """float32 [blocks, ...] as [blocks, values]."""
    found: Floats = values.reshape(len(values), -1)
    return found
