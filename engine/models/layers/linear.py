"""A linear layer over one or several weights that share their input."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.engine.weights.stored import Weight, expand, stack
from pdserve.kernels.ops import Ops


class Linear:
    """y = x W^T + b for the rows of all `weights` in order.

    With stored (quantized) weights each use expands them: slow, and the oracle for kernels that
    compute on the blocks.
    """

    def __init__(
        self,
        ops: Ops,
        weights: Sequence[Weight],
        biases: Sequence[Weight] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._ops = ops
        self._dtype = dtype
        self._parts = stack(weights, dtype)
        self._bias = torch.cat([expand(bias, dtype) for bias in biases]) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, N] to [T, rows of all weights]."""
        if len(self._parts) == 1:
            return self._ops.linear(x, expand(self._parts[0], self._dtype), self._bias)
        products = [self._ops.linear(x, expand(part, self._dtype)) for part in self._parts]
        y = torch.cat(products, dim=1)
        return y if self._bias is None else y + self._bias
