"""A mixture of experts on the CUDA kernels: the stacked weights of the experts, and their launches,
whose number does not depend on which experts the tokens choose."""

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from pdserve.engine.models.cuda.step import Run
from pdserve.engine.models.cuda.weights import DeviceWeights
from pdserve.engine.models.parts import Expert, Experts, Gating, Linear
from pdserve.kernels.cuda.experts import (
    Groups,
    MatrixStack,
    choose,
    combine,
    group,
    grouped_product,
    tile_tokens,
)
from pdserve.kernels.cuda.layer import gated
from pdserve.kernels.cuda.linear import DeviceMatrix


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """A product of each (token, expert) pair with one or several matrices of that expert; the
    result is [pairs, rows]."""

    stacks: tuple[tuple[int, MatrixStack], ...]  # (first output row, stack)
    rows: int
    bias: Tensor | None  # float32 [experts, rows]

    def __call__(self, x: Tensor, groups: Groups, *, by_pair: bool) -> Tensor:
        """Multiply the x of each pair with its expert's matrices. x is [pairs, N] in the order of
        `groups` if `by_pair`, else [tokens, N]. Returns [pairs, rows]."""
        out = torch.empty((len(groups.pairs), self.rows), dtype=x.dtype, device=x.device)
        for begin, stack in self.stacks:
            end = begin + stack.first.rows
            bias = None if self.bias is None else self.bias[:, begin:end]
            grouped_product(x, stack, groups, bias, out[:, begin:end], by_pair=by_pair)
        return out


class ExpertMatrices:
    """Collects the matrices of all experts into stacks, one stack for each storage format. Experts
    are added one by one and copied to their places, so that only one expert is held twice at a
    time."""

    def __init__(self, weights: DeviceWeights, experts: int) -> None:
        self._weights = weights
        self._experts = experts
        self._stacks: dict[tuple[int, Hashable], _Stack] = {}
        self._rows = 0
        self._biases: list[Tensor] = []

    def add(self, expert: int, linear: Linear) -> None:
        """Add the matrices of one expert. A matrix whose columns are stored in a different order is
        converted to plain numbers."""
        weights = self._weights
        raws = [weights.stored(spec.name) for spec in linear.weights]
        begin = 0
        for matrix in weights.matrices(raws, None):
            kind = (begin, _kind(matrix))
            if kind not in self._stacks:
                self._stacks[kind] = _Stack(matrix, self._experts)
            self._stacks[kind].add(expert, matrix)
            begin += matrix.rows
        self._rows = begin
        if linear.biases:
            self._biases.append(torch.cat([weights.vector(spec) for spec in linear.biases]))

    def product(self) -> ExpertProduct:
        stacks = tuple((begin, stack.build()) for (begin, _), stack in self._stacks.items())
        return ExpertProduct(
            stacks, self._rows, torch.stack(self._biases) if self._biases else None
        )


class _Stack:
    """Device memory for one matrix of each expert, all of one format and shape."""

    def __init__(self, first: DeviceMatrix, experts: int) -> None:
        self._first = first
        self._tensors = [
            None if tensor is None else tensor.new_empty((experts, *tensor.shape))
            for tensor in _tensors(first)
        ]
        self._experts: list[int] = []
        self._num_experts = experts

    def add(self, expert: int, matrix: DeviceMatrix) -> None:
        for space, tensor in zip(self._tensors, _tensors(matrix), strict=True):
            if space is not None and tensor is not None:
                space[len(self._experts)].copy_(tensor)
        self._experts.append(expert)

    def build(self) -> MatrixStack:
        count, tensors = len(self._experts), tuple(self._tensors)
        if count < self._num_experts:  # the others are in another stack: free their space
            tensors = tuple(None if space is None else space[:count].clone() for space in tensors)
        numbers = torch.full((self._num_experts,), -1, dtype=torch.int32)
        numbers[self._experts] = torch.arange(count, dtype=torch.int32)
        values, scales, zeros = (None if t is None else t[0] for t in tensors)
        assert values is not None
        first = replace(self._first, values=values, scales=scales, zeros=zeros)
        return MatrixStack(first, tensors, numbers.to(values.device))


def _tensors(matrix: DeviceMatrix) -> Sequence[Tensor | None]:
    return matrix.values, matrix.scales, matrix.zeros


def _kind(matrix: DeviceMatrix) -> Hashable:
    """Return a key of the properties that all matrices of one stack have in common."""
    tensors = tuple(None if t is None else (t.shape, t.dtype) for t in _tensors(matrix))
    return matrix.rows, matrix.cols, matrix.dtype, matrix.layout, matrix.group_blocks, tensors


class SharedExpert:
    """Computes the shared expert, a gated MLP that every token goes through."""

    def __init__(self, expert: Expert, activation: Gating, weights: DeviceWeights) -> None:
        self._gate_up = weights.product(expert.gate_up.weights, expert.gate_up.biases)
        self._down = weights.product(expert.down.weights, expert.down.biases)
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(gated(self._gate_up.split(x), self._activation))


class RoutedExperts:
    """Computes the routed experts: gated MLPs of which each token goes only through its chosen
    ones."""

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
        """Return the weighted sum of the results of each token's chosen experts, [T, hidden]. If
        given, the shared expert's result is added, times the sigmoid of its gate."""
        tiles = tile_tokens(self._stacks, chosen.numel(), self._count)
        groups = group(chosen, self._count, tiles)
        hidden = gated(self._gate_up(x, groups, by_pair=False), self._activation)
        return combine(self._down(hidden, groups, by_pair=True), weights, groups, shared, gate)


class LaunchedExperts:
    """Launches a whole mixture of experts: maps x [T, hidden] to [T, hidden]. Routing scores and
    the router's products are float32."""

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
