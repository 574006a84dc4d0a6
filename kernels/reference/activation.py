"""Activations, plain and gated (GLU variants, arXiv:2002.05202)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# gpt-oss: the steepness of its sigmoid, and the limit of its inputs (arXiv:2508.10925).
SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT = 1.702, 7.0


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
