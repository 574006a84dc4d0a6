"""GGUF's K formats: blocks of 256 values in sub-blocks whose scales are themselves quantized.

Formats without a minimum subtract a constant from their levels, which centres them on zero.
"""

import numpy as np

from pdserve.engine.weights.format import (
    BlockFormat,
    Bytes,
    Floats,
    fields,
    flat,
    floats,
    half,
    signed,
)


def scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """Unpack the twelve bytes of Q4_K and Q5_K: 6-bit scales and minima, float32 [blocks, 8] each.

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low six bits and, in their top two bits,
    the top two bits of 4-7. The nibbles of bytes 8-11 are the low four bits of 4-7.
    """
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & 63, (rest & 15) | (first >> 6 << 4)), 1)
    minima = np.concatenate((second & 63, (rest >> 4) | (second >> 6 << 4)), 1)
    return floats(scales), floats(minima)


def levels_of(packed: Bytes, bytes_at_once: int, width: int, values: int) -> Bytes:
    """Unpack the levels of blocks, fields of `width` bits in runs of `bytes_at_once` bytes: uint8
    [blocks, 256 / values, values]."""
    runs = packed.reshape(len(packed), -1, bytes_at_once)
    return fields(runs, width).reshape(len(packed), -1, values)


def unpack_q2_k(blocks: Bytes) -> Floats:
    packed = blocks[:, :16]
    scales = (floats(packed & 15) * half(blocks, 80))[:, :, None]
    minima = (floats(packed >> 4) * half(blocks, 82))[:, :, None]
    levels = levels_of(blocks[:, 16:80], 32, 2, 16)
    return flat(floats(levels) * scales - minima)


def unpack_q3_k(blocks: Bytes) -> Floats:
    low = fields(blocks[:, 96:104], 4).reshape(len(blocks), -1)  # [blocks, 16]
    high = fields(blocks[:, 104:108], 2).reshape(len(blocks), -1)
    scales = (floats(low | (high << 4)) - 32) * half(blocks, 108)
    levels = levels_of(blocks[:, 32:96], 32, 2, 16)
    top = fields(blocks[:, :32], 1).reshape(len(blocks), 16, 16)  # a clear bit subtracts four
    centred = floats(levels | (top << 2)) - 4
    return flat(centred * scales[:, :, None])


def unpack_q4_k(blocks: Bytes) -> Floats:
    scales, minima = scales_and_minima(blocks[:, 4:16])
    levels = levels_of(blocks[:, 16:], 32, 4, 32)
    scaled = floats(levels) * (scales * half(blocks, 0))[:, :, None]
    return flat(scaled - (minima * half(blocks, 2))[:, :, None])


def unpack_q5_k(blocks: Bytes) -> Floats:
    scales, minima = scales_and_minima(blocks[:, 4:16])
    low = levels_of(blocks[:, 48:], 32, 4, 32)
    levels = low | (fields(blocks[:, 16:48], 1) << 4)
    scaled = floats(levels) * (scales * half(blocks, 0))[:, :, None]
    return flat(scaled - (minima * half(blocks, 2))[:, :, None])


def unpack_q6_k(blocks: Bytes) -> Floats:
    low = levels_of(blocks[:, :128], 64, 4, 16)
    high = levels_of(blocks[:, 128:192], 32, 2, 16)
    scales = signed(blocks[:, 192:208]) * half(blocks, 208)
    centred = floats(low | (high << 4)) - 32
    return flat(centred * scales[:, :, None])


FORMATS = (
    BlockFormat("Q2_K", 256, 84, unpack_q2_k),
    BlockFormat("Q3_K", 256, 110, unpack_q3_k),
    BlockFormat("Q4_K", 256, 144, unpack_q4_k),
    BlockFormat("Q5_K", 256, 176, unpack_q5_k),
    BlockFormat("Q6_K", 256, 210, unpack_q6_k),
)
