"""Stored weights: their formats, and the conversion between formats."""

from pdserve.engine.weights.convert import (
    VERSION,
    as_plain,
    quantize_into,
    quantized_bytes,
    quantized_empty,
    unpack_into,
)
from pdserve.engine.weights.format import (
    BLOCKS,
    PIECE_VALUES,
    PLAIN,
    VALUES,
    BlockFormat,
    Bytes,
    Floats,
    RawTensor,
    empty,
    row_runs,
    same_order,
    write_rounded,
)
from pdserve.engine.weights.mix import TYPES, MatrixRole, Mix, StoredMatrix, find_type
