"""Stored weights as torch holds them: as tensors, or in stored form and expanded at each use."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.engine.execution import Ints
from pdserve.engine.weights import VALUES, RawTensor
from pdserve.engine.weights.unpack import unpack

HELD = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
Weight = Tensor | RawTensor
Weights = Callable[[str], RawTensor]  # by Hugging Face name; called once per name


def hold(raw: RawTensor, dtype: torch.dtype, device: torch.device) -> Weight:
    """Turn plain numbers of `dtype` into a tensor on the device; keep everything else as stored."""
    if raw.format != HELD[dtype]:
        return raw
    return torch.from_numpy(raw.parts[VALUES]).view(dtype).to(device)


def expand(weight: Weight, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values in `dtype`; a stored weight is expanded at each call, which is slow."""
    if isinstance(weight, Tensor):
        return weight
    return torch.from_numpy(unpack(weight)).to(device, dtype)


def stack(
    raws: Sequence[RawTensor], dtype: torch.dtype, device: torch.device
) -> tuple[Weight, ...]:
    """Join matrices over one input, so that they cost one product; if any is in stored form, they
    stay separate."""
    weights = [hold(raw, dtype, device) for raw in raws]
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(tensors) < len(weights):
        return tuple(weights)
    return (torch.cat(tensors) if len(tensors) > 1 else tensors[0],)


def rows(weight: Weight, index: Ints, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows [T] of a matrix [V, N] in `dtype`, as [T, N]; only those are expanded."""
    if isinstance(weight, Tensor):
        return weight.index_select(0, torch.from_numpy(index).to(device))
    return expand(weight.rows(index), dtype, device)
