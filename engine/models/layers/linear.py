"""A linear layer over one or several weights that share their input."""

import torch
from torch import Tensor

from pdserve.engine.models.layers.stored import expand, stack
from pdserve.engine.models.layers.torch_part import LayerStep, Setup, computes
from pdserve.engine.models.parts import Linear


@computes(Linear)
class TorchLinear:
    """y = x W^T + b for the rows of all weights in order.

    With stored (quantized) weights each use expands them: slow, and the oracle for kernels that
    compute on the blocks.
    """

    def __init__(self, part: Linear, setup: Setup) -> None:
        self._setup = setup
        dtype, device = setup.dtype, setup.device
        self._parts = stack([setup.weights(w.name) for w in part.weights], dtype, device)
        biases = [expand(setup.weights(b.name), dtype, device) for b in part.biases]
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor, step: LayerStep | None = None) -> Tensor:
        """x [T, N] to [T, rows of all weights]."""
        ops, dtype, device = self._setup.ops, self._setup.dtype, self._setup.device
        if len(self._parts) == 1:
            return ops.linear(x, expand(self._parts[0], dtype, device), self._bias)
        products = [ops.linear(x, expand(part, dtype, device)) for part in self._parts]
        y = torch.cat(products, dim=1)
        return y if self._bias is None else y + self._bias
