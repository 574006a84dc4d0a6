"""Gated activations (GLU variants, arXiv:2002.05202)."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, up: Tensor, activation: Literal["silu", "gelu_tanh", "gelu"]) -> Tensor:
    """activation(gate) * up, elementwise; gelu_tanh is the tanh approximation of gelu."""
    if activation == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)
