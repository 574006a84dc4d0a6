"""A mixture of experts: all on the device, in a number of launches that no token changes."""

from dataclasses import asdict

from torch import Tensor

from pdserve.engine.models.cuda.run import Run
from pdserve.engine.models.cuda.stacks import ExpertMatrices
from pdserve.engine.models.cuda.weights import DeviceWeights
from pdserve.engine.models.parts import Expert, Experts, Gating
from pdserve.kernels.cuda.experts.combine import combine
from pdserve.kernels.cuda.experts.grouped import tile_tokens
from pdserve.kernels.cuda.experts.grouping import group
from pdserve.kernels.cuda.experts.routing import choose
from pdserve.kernels.cuda.layer.activation import gated


class SharedExpert:
    """The gated MLP that every token goes to."""

    def __init__(self, expert: Expert, activation: Gating, weights: DeviceWeights) -> None:
        self._gate_up = weights.product(expert.gate_up.weights, expert.gate_up.biases)
        self._down = weights.product(expert.down.weights, expert.down.biases)
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(gated(self._gate_up.split(x), self._activation))


class RoutedExperts:
    """The gated MLPs that tokens are routed to."""

    def __init__(self, part: Experts, weights: DeviceWeights) -> None:
        self._count = len(part.experts)
        gate_up, down = (ExpertMatrices(weights, self._count) for _ in range(2))
        for n, expert in enumerate(part.experts):
            gate_up.add(n, expert.gate_up)
            down.add(n, expert.down)
        self._gate_up, self._down = gate_up.product(), down.product()
        self._stacks = [stack for _, stack in (*self._gate_up.stacks, *self._down.stacks)]
        self._activation = part.activation

    def __call__(
        self, x: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """Return the weighted sum of the chosen experts' results, plus the shared expert's."""
        tiles = tile_tokens(self._stacks, chosen.numel(), self._count)
        groups = group(chosen, self._count, tiles)
        hidden = gated(self._gate_up(x, groups, by_pair=False), self._activation)
        return combine(self._down(hidden, groups, by_pair=True), weights, groups, shared, gate)


class LaunchedExperts:
    """Maps x [T, hidden] to [T, hidden]. Scores and the router's products are float32."""

    def __init__(self, part: Experts, weights: DeviceWeights) -> None:
        self._routing = asdict(part.routing)
        bias = weights.vector(part.router_bias) if part.router_bias else None
        self._router = weights.float32_product(part.router, bias)
        self._correction = weights.vector(part.correction) if part.correction else None
        self._gate = weights.float32_product(part.shared_gate) if part.shared_gate else None
        self._routed = RoutedExperts(part, weights)
        shared = part.shared
        self._shared = SharedExpert(shared, part.activation, weights) if shared else None

    def __call__(self, run: Run) -> None:
        x, exact = run.x, run.x.float()
        chosen, weights = choose(self._router(exact), self._correction, **self._routing)
        shared = None if self._shared is None else self._shared(x)
        gate = None if self._gate is None else self._gate(exact)
        run.x = self._routed(x, chosen, weights, shared, gate)
