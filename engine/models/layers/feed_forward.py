"""The operations between the products of a feed-forward, and the scale of its result."""

from torch import Tensor

from pdserve.engine.models.layers.torch_part import LayerStep, Setup, computes
from pdserve.engine.models.parts import Activate, Gate, Scale


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
