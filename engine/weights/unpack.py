"""Unpacking of stored weights of any format."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.weights.format import CHUNK_VALUES, VALUES, Floats, RawTensor, row_runs
from pdserve.engine.weights.formats import formats
from pdserve.engine.weights.plain import PLAIN, empty, widened, write_rounded


def unpack(raw: RawTensor) -> Floats:
    """Return the values of `raw`, float32 of raw.shape; a float32 weight is not copied.

    Raises KeyError for an unregistered format.
    """
    if raw.format in PLAIN:
        return widened(raw.parts[VALUES], raw.format)
    out = empty(raw.shape, "F32")
    unpack_into(raw, out, "F32")
    return out


def unpack_into(raw: RawTensor, out: NDArray[Any], format: str) -> None:
    """Write the values of `raw` into `out`, of raw.shape, as plain numbers of `format`, in chunks
    of rows; each value is rounded once."""
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
    """Convert `raw` to plain numbers of `format`; return `raw` if it already has this format."""
    if raw.format == format:
        return raw
    out = empty(raw.shape, format)
    unpack_into(raw, out, format)
    return RawTensor({VALUES: out}, format, raw.shape)
