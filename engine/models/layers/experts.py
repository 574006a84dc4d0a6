"""A mixture of experts on torch: it chooses the experts of each token and runs them."""

import torch
from torch import Tensor

from pdserve.engine.models.layers.linear import TorchLinear
from pdserve.engine.models.layers.torch_part import LayerStep, Setup, computes
from pdserve.engine.models.parts import Expert, ExpertRouting, Experts, Gating

MIN_SUM = 1e-20  # lower bound of the divisor of normalized weights


def choose_experts(
    logits: Tensor, correction: Tensor | None, routing: ExpertRouting
) -> tuple[Tensor, Tensor]:
    """Choose experts by logits, float32 [T, experts], and correction, [experts].

    Return the experts, int64 [T, top_k], best first, and their weights, float32 [T, top_k].
    Source: arXiv:2412.19437, 2.1.2.
    """
    scores = torch.softmax(logits, -1) if routing.scores == "softmax" else torch.sigmoid(logits)
    ranks = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = ranks.view(len(ranks), routing.groups, -1)
        quality = grouped.topk(routing.group_best, dim=-1).values.sum(-1)
        kept_groups = _best(quality, routing.kept_groups)
        dropped = torch.ones_like(quality, dtype=torch.bool).scatter_(1, kept_groups, False)
        ranks = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    chosen = _best(ranks, routing.top_k)
    weights = scores.gather(1, chosen)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + MIN_SUM)
    return chosen, weights * routing.scale


def _best(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest values of each row; ties go to the first."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


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
