"""Norms of the stream or of a branch."""

from torch import Tensor

from pdserve.engine.models.layers.torch_part import LayerStep, Setup, computes
from pdserve.engine.models.parts import LayerNorm, Norm


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
