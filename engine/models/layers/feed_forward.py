"""The gate of a feed-forward."""

from torch import Tensor

from pdserve.engine.models.layers.torch_part import LayerStep, Setup, computes
from pdserve.engine.models.parts import Gate


@computes(Gate)
class TorchGate:
    """x [T, 2 N] to activation(x[:, :N]) * x[:, N:]."""

    def __init__(self, part: Gate, setup: Setup) -> None:
        self._ops = setup.ops
        self._activation = part.activation

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        gate, up = x.chunk(2, dim=1)
        return self._ops.gated(gate, up, self._activation)
