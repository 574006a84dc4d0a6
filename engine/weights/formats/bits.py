"""Reading numbers out of packed blocks; block layouts are those of GGML (ggml-common.h)."""

import torch
from torch import Tensor


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def fields(packed: Tensor, width: int) -> Tensor:
    """Fields of `width` bits, lowest first: uint8 [..., bytes] -> [..., 8 / width, bytes]."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-2) >> shifts.unsqueeze(-1)) & ((1 << width) - 1)
