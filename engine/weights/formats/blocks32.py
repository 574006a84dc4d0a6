"""GGUF formats with blocks of 32 values and one scale per block; formats ending in _1 also have one
minimum per block.

The low nibbles of a block's bytes are its first 16 values, the high nibbles the other 16.
"""

import numpy as np

from pdserve.engine.weights.format import BlockFormat, Bytes, Floats, fields, floats, half, signed


def nibbles(packed: Bytes) -> Bytes:
    """Unpack the 4-bit levels of blocks: uint8 [blocks, 16] to uint8 [blocks, 32]."""
    return fields(packed, 4).reshape(len(packed), -1)


def fifth_bits(packed: Bytes) -> Bytes:
    """Unpack the fifth bit of 5-bit levels from a little-endian bit mask: uint8 [blocks, 4] to
    uint8 [blocks, 32] of 0 or 16."""
    return fields(packed, 1).swapaxes(1, 2).reshape(len(packed), -1) << np.uint8(4)


def unpack_q4_0(blocks: Bytes) -> Floats:
    return (floats(nibbles(blocks[:, 2:])) - 8) * half(blocks, 0)


def unpack_q4_1(blocks: Bytes) -> Floats:
    return floats(nibbles(blocks[:, 4:])) * half(blocks, 0) + half(blocks, 2)


def unpack_q5_0(blocks: Bytes) -> Floats:
    levels = nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])
    return (floats(levels) - 16) * half(blocks, 0)


def unpack_q5_1(blocks: Bytes) -> Floats:
    levels = nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return floats(levels) * half(blocks, 0) + half(blocks, 2)


def unpack_q8_0(blocks: Bytes) -> Floats:
    return signed(blocks[:, 2:]) * half(blocks, 0)


FORMATS = (
    BlockFormat("Q4_0", 32, 18, unpack_q4_0),
    BlockFormat("Q4_1", 32, 20, unpack_q4_1),
    BlockFormat("Q5_0", 32, 22, unpack_q5_0),
    BlockFormat("Q5_1", 32, 24, unpack_q5_1),
    BlockFormat("Q8_0", 32, 34, unpack_q8_0),
)
