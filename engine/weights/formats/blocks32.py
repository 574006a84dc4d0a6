"""Formats of 32 values with one scale (and for _1 one minimum) per block.

The low nibbles of a block's bytes are its first 16 values, the high ones the rest.
"""

import torch
from torch import Tensor

from pdserve.engine.weights.format import Format
from pdserve.engine.weights.formats.bits import fields, half


def nibbles(packed: Tensor) -> Tensor:
    """uint8 [blocks, 16] -> uint8 [blocks, 32]."""
    return fields(packed, 4).flatten(1)


def fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [blocks, 4], little-endian bit mask -> uint8 [blocks, 32] of 0 or 16."""
    return fields(packed, 1).transpose(1, 2).flatten(1) << 4


def unpack_q4_0(blocks: Tensor) -> Tensor:
    return (nibbles(blocks[:, 2:]).float() - 8) * half(blocks, 0)


def unpack_q4_1(blocks: Tensor) -> Tensor:
    return (nibbles(blocks[:, 4:]).float().mul_(half(blocks, 0))).add_(half(blocks, 2))


def unpack_q5_0(blocks: Tensor) -> Tensor:
    levels = nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])
    return (levels.float() - 16) * half(blocks, 0)


def unpack_q5_1(blocks: Tensor) -> Tensor:
    levels = nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return levels.float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def unpack_q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * half(blocks, 0)


FORMATS = (
    Format("Q4_0", 32, 18, unpack_q4_0),
    Format("Q4_1", 32, 20, unpack_q4_1),
    Format("Q5_0", 32, 22, unpack_q5_0),
    Format("Q5_1", 32, 24, unpack_q5_1),
    Format("Q8_0", 32, 34, unpack_q8_0),
)
