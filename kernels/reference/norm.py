"""RMS norm (arXiv:1910.07467) and layer norm (arXiv:1607.06450). Statistics and scaling in float32,
rounded once at the end."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim; x [..., N], weight float32 [N]; in x's dtype."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / deviation * weight + bias over the last dim; x [..., N], weight and bias float32
    [N]; in x's dtype."""
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)
