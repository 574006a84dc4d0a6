"""Activations, plain and gated (GLU variants, arXiv:2002.05202)."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, up: Tensor, activation: Literal["silu", "gelu_tanh", "gelu"]) -> Tensor:
    """activation(gate) * up, elementwise; gelu_tanh is the tanh approximation of gelu."""
    return activated(gate, activation).mul_(up)


def activated(x: Tensor, activation: Literal["silu", "gelu_tanh", "gelu"]) -> Tensor:
    """activation(x), elementwise."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
