"""Layers on torch: activations (GLU variants, arXiv:2002.05202), products, RMS norm
(arXiv:1910.07467), layer norm (arXiv:1607.06450), and rotary position embedding
(arXiv:2104.09864).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# gpt-oss: the steepness of its sigmoid, and the limit of its inputs (arXiv:2508.10925).
SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT = 1.702, 7.0
FEW = range(2, 5)  # tokens


def gated(
    gate: Tensor, up: Tensor, activation: Literal["silu", "gelu_tanh", "gelu", "swiglu_oai"]
) -> Tensor:
    """Return activation(gate) * up, elementwise; gelu_tanh is the tanh approximation of gelu.

    swiglu_oai: gate * sigmoid(1.702 * gate) * (up + 1), gate clamped to at most 7, up to [-7, 7].
    """
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=SWIGLU_OAI_LIMIT), up.clamp(-SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT)
        return torch.sigmoid(gate * SWIGLU_OAI_ALPHA).mul_(gate).mul_(up + 1)
    return activated(gate, activation).mul_(up)


def activated(x: Tensor, activation: Literal["silu", "gelu_tanh", "gelu"]) -> Tensor:
    """Return activation(x), elementwise."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [T, N] times weight [M, N] transposed, plus bias [M]: [T, M], all of one dtype."""
    if len(x) in FEW and len(weight) >= x.shape[1] and x.is_cpu and x.dtype == torch.float32:
        # The library is two to ten times faster with the float32 weight as the left operand.
        y = (weight @ x.t()).t().contiguous()
        return y if bias is None else y.add_(bias)
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim, in x's dtype; x [..., N], weight float32 [N]."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / deviation * weight + bias over the last dim, in x's dtype; x [..., N],
    weight and bias float32 [N]."""
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


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
