"""Storage formats of weights."""

from pdserve.engine.weights.bits import Bytes
from pdserve.engine.weights.format import (
    BLOCKS,
    PIECE_VALUES,
    VALUES,
    BlockFormat,
    Floats,
    RawTensor,
    row_runs,
    same_order,
)
from pdserve.engine.weights.mix import TYPES, MatrixRole, Mix, StoredMatrix, find_type
from pdserve.engine.weights.plain import PLAIN, empty, write_rounded
from pdserve.engine.weights.quantize import VERSION, quantize_into, quantized_bytes, quantized_empty
from pdserve.engine.weights.unpack import as_plain, unpack_into
