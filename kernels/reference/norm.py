"""RMS norm (arXiv:1910.07467) and layer norm (arXiv:1607.06450). Statistics and scaling are
float32, rounded once at the end."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim, in x's dtype; x [..., N], weight float32 [N]."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / deviation * weight + bias over the last dim, in x's dtype; x [..., N],
    weight and bias float32 [N]."""
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)
