"""Linear layers, norms, and the operations between the products of a feed-forward."""

import torch
from torch import Tensor

from pdserve.engine.models.layers.stored import expand, hold, stack
from pdserve.engine.models.layers.torch_part import LayerStep, Setup, computes
from pdserve.engine.models.parts import Activate, Gate, HeadLinear, LayerNorm, Linear, Norm, Scale


@computes(Linear)
class TorchLinear:
    """y = x W^T + b for the rows of all weights in order.

    Stored (quantized) weights are expanded at each use: slow, and the reference for kernels that
    compute on the blocks.
    """

    def __init__(self, part: Linear, setup: Setup) -> None:
        self._setup = setup
        dtype, device = setup.dtype, setup.device
        self._parts = stack([setup.weights(w.name) for w in part.weights], dtype, device)
        biases = [expand(setup.weights(b.name), dtype, device) for b in part.biases]
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor, step: LayerStep | None = None) -> Tensor:
        """Map x [T, N] to [T, rows of all weights]."""
        ops, dtype, device = self._setup.ops, self._setup.dtype, self._setup.device
        if len(self._parts) == 1:
            return ops.linear(x, expand(self._parts[0], dtype, device), self._bias)
        products = [ops.linear(x, expand(part, dtype, device)) for part in self._parts]
        y = torch.cat(products, dim=1)
        return y if self._bias is None else y + self._bias


@computes(HeadLinear)
class TorchHeadLinear:
    """A product for each head."""

    def __init__(self, part: HeadLinear, setup: Setup) -> None:
        self._setup = setup
        self._kept = part.kept
        *heads, self._outputs, self._inputs = part.weight.shape
        self._heads = heads[0] if heads else 1
        self._weight = hold(setup.weights(part.weight.name), setup.dtype, setup.device)

    def __call__(self, x: Tensor, step: LayerStep | None = None) -> Tensor:
        """Map x [T, heads * (kept + inputs) + rest] to [T, heads * (kept + outputs) + rest]."""
        weight = expand(self._weight, self._setup.dtype, self._setup.device)
        weight = weight.view(self._heads, self._outputs, self._inputs)
        size = self._heads * (self._kept + self._inputs)
        heads = x[:, :size].reshape(len(x), self._heads, -1)
        kept, inputs = heads[:, :, : self._kept], heads[:, :, self._kept :]
        products = [self._setup.ops.linear(inputs[:, n], matrix) for n, matrix in enumerate(weight)]
        head_outputs = torch.cat((kept, torch.stack(products, 1)), 2).flatten(1)
        return torch.cat((head_outputs, x[:, size:]), 1)


@computes(Norm)
class TorchNorm:
    """x [..., hidden] to the same shape, in x's dtype."""

    def __init__(self, part: Norm, setup: Setup) -> None:
        self._ops = setup.ops
        self._eps = part.eps
        self._weight = setup.vector(part.weight, part.offset)

    def __call__(self, x: Tensor, step: LayerStep | None = None) -> Tensor:
        return self._ops.rms_norm(x, self._weight, self._eps)


@computes(LayerNorm)
class TorchLayerNorm:
    """x [..., hidden] to the same shape, in x's dtype."""

    def __init__(self, part: LayerNorm, setup: Setup) -> None:
        self._ops = setup.ops
        self._eps = part.eps
        self._weight = setup.vector(part.weight)
        self._bias = setup.vector(part.bias) if part.bias else None

    def __call__(self, x: Tensor, step: LayerStep | None = None) -> Tensor:
        return self._ops.layer_norm(x, self._weight, self._bias, self._eps)


@computes(Gate)
class TorchGate:
    """x [T, 2 N] to activation(x[:, :N]) * x[:, N:]."""

    def __init__(self, part: Gate, setup: Setup) -> None:
        self._ops = setup.ops
        self._activation = part.activation

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        gate, up = x.chunk(2, dim=1)
        return self._ops.gated(gate, up, self._activation)


@computes(Activate)
class TorchActivate:
    """x [T, N] to activation(x)."""

    def __init__(self, part: Activate, setup: Setup) -> None:
        self._ops = setup.ops
        self._activation = part.activation

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        return self._ops.activated(x, self._activation)


@computes(Scale)
class TorchScale:
    """x [T, N] times the factor, rounded to x's dtype."""

    def __init__(self, part: Scale, setup: Setup) -> None:
        self._factor = part.factor

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        return x * self._factor
