"""Matrix products with weights."""

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, N] times weight [M, N] transposed, plus bias [M]: [T, M], all of one dtype."""
    return F.linear(x, weight, bias)
