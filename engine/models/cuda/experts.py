"""A mixture of experts: one expert after the other, each on all of its tokens. The host waits for
the device to learn which these are."""

import torch
from torch import Tensor

from pdserve.engine.models.cuda.run import Run
from pdserve.engine.models.cuda.weights import DeviceWeights
from pdserve.engine.models.layers.routing import choose_experts
from pdserve.engine.models.parts import Expert, Experts, Gating
from pdserve.kernels.cuda.layer.activation import gated


class DeviceExpert:
    """One gated MLP."""

    def __init__(self, expert: Expert, activation: Gating, weights: DeviceWeights) -> None:
        self._gate_up = weights.product(expert.gate_up.weights, expert.gate_up.biases)
        self._down = weights.product(expert.down.weights, expert.down.biases)
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(gated(self._gate_up(x), self._activation))


class LaunchedExperts:
    """x [T, hidden] to the same. Scores are float32, and so are the router's products."""

    def __init__(self, part: Experts, weights: DeviceWeights) -> None:
        self._routing = part.routing
        bias = weights.vector(part.router_bias) if part.router_bias else None
        self._router = weights.float32_product(part.router, bias)
        self._correction = weights.vector(part.correction) if part.correction else None
        self._gate = weights.float32_product(part.shared_gate) if part.shared_gate else None
        self._experts = [DeviceExpert(e, part.activation, weights) for e in part.experts]
        shared = part.shared
        self._shared = DeviceExpert(shared, part.activation, weights) if shared else None

    def __call__(self, run: Run) -> None:
        x = run.x
        chosen, weights = choose_experts(self._router(x.float()), self._correction, self._routing)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self._experts):
            tokens, ranks = torch.where(chosen == n)
            if len(tokens):
                out[tokens] += expert(x[tokens]) * weights[tokens, ranks, None].to(x.dtype)
        if self._shared is not None:
            y = self._shared(x)
            if self._gate is not None:
                y = y * torch.sigmoid(self._gate(x.float())).to(x.dtype)
            out = out + y
        run.x = out
