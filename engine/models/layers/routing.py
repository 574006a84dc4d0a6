"""Which experts of a mixture each token goes to."""

import torch
from torch import Tensor

from pdserve.engine.models.parts import ExpertRouting

LEAST_SUM = 1e-20  # what normalized weights are divided by at least


def choose_experts(
    logits: Tensor, correction: Tensor | None, routing: ExpertRouting
) -> tuple[Tensor, Tensor]:
    """float32 [T, experts], [experts] -> experts int64 [T, top_k] and their weights, float32 [T,
    top_k]; the best first. Source: arXiv:2412.19437, 2.1.2."""
    scores = torch.softmax(logits, -1) if routing.scores == "softmax" else torch.sigmoid(logits)
    ranks = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = ranks.view(len(ranks), routing.groups, -1)
        quality = grouped.topk(routing.group_best, dim=-1).values.sum(-1)
        kept = _best(quality, routing.kept_groups)
        outside = torch.ones_like(quality, dtype=torch.bool).scatter_(1, kept, False)
        ranks = grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)
    chosen = _best(ranks, routing.top_k)
    weights = scores.gather(1, chosen)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return chosen, weights * routing.scale


def _best(values: Tensor, count: int) -> Tensor:
    """Where the `count` largest of each row are; of equal ones the first come first."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]
