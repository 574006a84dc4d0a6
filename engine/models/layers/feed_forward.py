"""The feed-forward part of a layer."""

from typing import Protocol

from torch import Tensor

from pdserve.engine.models.config import Activation
from pdserve.engine.models.layers.linear import Linear
from pdserve.kernels.ops import Ops


class FeedForward(Protocol):
    """Token-wise: [T, hidden] to [T, hidden]. A mixture of experts is another one of these."""

    def __call__(self, x: Tensor) -> Tensor: ...


class GatedMlp:
    """down(activation(gate x) * up x), gate and up from one product."""

    def __init__(self, ops: Ops, activation: Activation, gate_up: Linear, down: Linear) -> None:
        self._ops = ops
        self._activation: Activation = activation
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=1)
        return self._down(self._ops.gated(gate, up, self._activation))
