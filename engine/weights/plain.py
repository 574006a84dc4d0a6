"""Weights stored as plain numbers, and conversions from and to float32.

bfloat16 is the upper half of float32; numpy has no type for it, so its bits are held as uint16.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.weights.format import Floats

# Format name -> numpy type that holds a number.
PLAIN: Mapping[str, "np.dtype[Any]"] = MappingProxyType(
    {
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(np.uint16),
        "F64": np.dtype(np.float64),
    }
)
NAN_BF16 = 0x7FC0


def widened(values: NDArray[Any], format: str) -> Floats:
    """Convert plain numbers to float32; return float32 numbers without a copy."""
    if format == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def write_rounded(values: NDArray[Any], out: NDArray[Any], format: str) -> None:
    """Write float32 or float64 values as plain numbers of `format`, rounded to nearest even."""
    if format != "BF16":
        with np.errstate(over="ignore"):  # values out of range become infinite, as in every format
            out[...] = values
        return
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded[np.isnan(values)] = NAN_BF16
    out[...] = rounded.astype(np.uint16)


def empty(shape: tuple[int, ...], format: str) -> NDArray[Any]:
    """Allocate an uninitialized array for plain numbers of `format`."""
    return np.empty(shape, PLAIN[format])
