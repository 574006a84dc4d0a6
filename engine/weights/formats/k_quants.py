"""Formats of 256 values in sub-blocks whose scales are themselves quantized.

Where a format has no minimum its levels are centred on zero by a constant.
"""

import torch
from torch import Tensor

from pdserve.engine.weights.format import Format
from pdserve.engine.weights.formats.bits import fields, half


def scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_K's and Q5_K's twelve bytes -> float32 [blocks, 8] scales and minima of 6 bits each.

    Bytes 0-3 and 4-7 hold the low six bits of scales and minima 0-3 and, in their top two bits,
    the top two of 4-7, whose low four are the nibbles of bytes 8-11.
    """
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), 1)
    minima = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), 1)
    return scales.float(), minima.float()


def unpack_q2_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, :16]
    scales = ((packed & 15).float() * half(blocks, 80)).unsqueeze(2)
    minima = ((packed >> 4).float() * half(blocks, 82)).unsqueeze(2)
    levels = fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return levels.float().mul_(scales).sub_(minima).flatten(1)


def unpack_q3_k(blocks: Tensor) -> Tensor:
    low = fields(blocks[:, 96:104], 4).flatten(1)  # [blocks, 16]
    high = fields(blocks[:, 104:108], 2).flatten(1)
    scales = ((low | (high << 4)).float() - 32) * half(blocks, 108)
    levels = fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    top = fields(blocks[:, :32], 1).reshape(-1, 16, 16)  # a clear bit takes four off
    centred = (levels | (top << 2)).float() - 4
    return centred.mul_(scales.unsqueeze(2)).flatten(1)


def unpack_q4_k(blocks: Tensor) -> Tensor:
    scales, minima = scales_and_minima(blocks[:, 4:16])
    levels = fields(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    scaled = levels.float().mul_((scales * half(blocks, 0)).unsqueeze(2))
    return scaled.sub_((minima * half(blocks, 2)).unsqueeze(2)).flatten(1)


def unpack_q5_k(blocks: Tensor) -> Tensor:
    scales, minima = scales_and_minima(blocks[:, 4:16])
    low = fields(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    levels = low | (fields(blocks[:, 16:48], 1) << 4)
    scaled = levels.float().mul_((scales * half(blocks, 0)).unsqueeze(2))
    return scaled.sub_((minima * half(blocks, 2)).unsqueeze(2)).flatten(1)


def unpack_q6_k(blocks: Tensor) -> Tensor:
    low = fields(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 16, 16)
    high = fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8).float() * half(blocks, 208)
    centred = (low | (high << 4)).float() - 32
    return centred.mul_(scales.unsqueeze(2)).flatten(1)


FORMATS = (
    Format("Q2_K", 256, 84, unpack_q2_k),
    Format("Q3_K", 256, 110, unpack_q3_k),
    Format("Q4_K", 256, 144, unpack_q4_k),
    Format("Q5_K", 256, 176, unpack_q5_k),
    Format("Q6_K", 256, 210, unpack_q6_k),
)
