"""A mixture of experts on torch."""

import torch
from torch import Tensor

from pdserve.engine.models.layers.linear import TorchLinear
from pdserve.engine.models.layers.routing import choose_experts
from pdserve.engine.models.layers.torch_part import LayerStep, Setup, computes
from pdserve.engine.models.parts import Expert, Experts, Gating


class TorchExpert:
    """One gated MLP."""

    def __init__(self, expert: Expert, activation: Gating, setup: Setup) -> None:
        self._gate_up = TorchLinear(expert.gate_up, setup)
        self._down = TorchLinear(expert.down, setup)
        self._ops = setup.ops
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=1)
        return self._down(self._ops.gated(gate, up, self._activation))


@computes(Experts)
class TorchExperts:
    """Maps x [T, hidden] to [T, hidden]; one expert after the other, each on all of its tokens."""

    def __init__(self, part: Experts, setup: Setup) -> None:
        self._routing = part.routing
        self._router = setup.vector(part.router)
        self._router_bias = setup.vector(part.router_bias) if part.router_bias else None
        self._correction = setup.vector(part.correction) if part.correction else None
        self._gate = setup.vector(part.shared_gate) if part.shared_gate else None
        self._experts = [TorchExpert(e, part.activation, setup) for e in part.experts]
        self._shared = TorchExpert(part.shared, part.activation, setup) if part.shared else None
        self._ops = setup.ops

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        logits = self._ops.linear(x.float(), self._router, self._router_bias)
        chosen, weights = choose_experts(logits, self._correction, self._routing)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self._experts):
            tokens, ranks = torch.where(chosen == n)
            if len(tokens):
                out[tokens] += expert(x[tokens]) * weights[tokens, ranks, None].to(x.dtype)
        if self._shared is None:
            return out
        y = self._shared(x)
        if self._gate is not None:
            y = y * torch.sigmoid(self._ops.linear(x.float(), self._gate)).to(x.dtype)
        return out + y
