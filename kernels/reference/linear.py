"""Matrix products with weight matrices."""

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = range(2, 5)  # tokens


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [T, N] times weight [M, N] transposed, plus bias [M]: [T, M], all of one dtype."""
    if len(x) in FEW and len(weight) >= x.shape[1] and x.is_cpu and x.dtype == torch.float32:
        # The library is two to ten times faster with the float32 weight as the left operand.
        y = (weight @ x.t()).t().contiguous()
        return y if bias is None else y.add_(bias)
    return F.linear(x, weight, bias)
