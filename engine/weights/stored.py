"""Weights as layers hold them: expanded once at load, or as stored and expanded at each use."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.engine.weights.format import RawTensor
from pdserve.engine.weights.registry import unpack

Weight = Tensor | RawTensor
Weights = Callable[[str], Weight]  # by Hugging Face name, each asked for once


def expand(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The values in `dtype`; blocks are expanded anew at each call, which is slow."""
    return unpack(weight, dtype) if isinstance(weight, RawTensor) else weight.to(dtype)


def stack(weights: Sequence[Weight], dtype: torch.dtype) -> tuple[Weight, ...]:
    """Matrices over one input as one, so that they cost one product; stored blocks stay apart."""
    expanded = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(expanded) < len(weights):
        return tuple(weights)
    return (torch.cat(expanded).to(dtype) if len(expanded) > 1 else expanded[0].to(dtype),)


def rows(weight: Weight, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [T] of a matrix [V, N] in `dtype`: [T, N]; of stored blocks only those rows."""
    if isinstance(weight, RawTensor):
        picked = weight.data.index_select(0, index)
        return unpack(RawTensor(picked, weight.format, (len(index), weight.shape[1])), dtype)
    return weight.index_select(0, index).to(dtype)
