"""Rotary position embedding (arXiv:2104.09864), in the half-split form of Hugging Face weights."""

import torch
from torch import Tensor


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dims of each head; dim i pairs with dim i + R / 2.

    x [T, H, D]; positions int64 [T]; cos and sin float32 [P, R / 2], one row per position. The
    result is computed in float32 and returned in x's dtype; dims from R on are copied.
    """
    half = cos.shape[1]
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, R / 2]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty_like(x)
    out[..., :half] = first * c - second * s
    out[..., half : 2 * half] = second * c + first * s
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
