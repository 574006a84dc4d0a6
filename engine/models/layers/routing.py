"""Chooses the experts of a mixture for each token."""

import torch
from torch import Tensor

from pdserve.engine.models.parts import ExpertRouting

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
