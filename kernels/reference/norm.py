"""RMS norm (arXiv:1910.07467). Statistics and scaling in float32, rounded once at the end."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim; x [..., N], weight float32 [N]; in x's dtype."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
