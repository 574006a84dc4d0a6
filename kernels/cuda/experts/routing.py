"""Routing of tokens to the experts of a mixture, in Triton. Each program handles one token, so
other tokens never affect its sums."""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_SUM: tl.constexpr = tl.constexpr(1e-20)  # added to the divisor of normalized weights
MIN_KEY: tl.constexpr = tl.constexpr(-(1 << 63))  # below the key of any number


def choose(
    logits: Tensor,
    correction: Tensor | None,
    top_k: int,
    *,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    normalized: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    kept_groups: int = 1,
    group_best: int = 1,
) -> tuple[Tensor, Tensor]:
    """Choose experts for logits float32 [T, experts] and correction [experts]: int32 [T, top_k] in
    ascending order, and weights float32 [T, top_k]. Source: arXiv:2412.19437, 2.1.2.

    The best sums of score and correction win, ties go to the first expert; ExpertRouting in
    engine/models/parts.py defines the rule. NaN counts as the largest logit.
    """
    tokens, experts = logits.shape
    size = experts // groups
    if top_k > experts or size * groups != experts or group_best > size or kept_groups > groups:
        raise ValueError(
            f"{top_k} of {experts} experts cannot be chosen from {kept_groups} of {groups} groups "
            f"by {group_best} scores"
        )
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits are {logits.dtype}, strides {logits.stride()}")
    if correction is not None and correction.shape != (experts,):
        raise ValueError(f"correction is {list(correction.shape)}, expected [{experts}]")
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    if tokens:
        _choose[(tokens,)](
            logits,
            correction,
            chosen,
            weights,
            scale,
            SIZE=size,
            GROUPS=groups,
            TOP_K=top_k,
            KEPT_GROUPS=kept_groups,
            GROUP_BEST=group_best,
            SOFTMAX=scores == "softmax",
            NORMALIZED=normalized,
            SIZE_LANES=triton.next_power_of_2(size),
            GROUP_LANES=triton.next_power_of_2(groups),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return chosen, weights


@triton.jit
def _keys(values, lanes, LANES: tl.constexpr):
    """Return int64 keys in the order of the values; ties give the first value the largest key."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (LANES - 1 - lanes)


@triton.jit
def _choose(
    logits, correction, chosen, weights, scale,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_K: tl.constexpr, KEPT_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZED: tl.constexpr,
    SIZE_LANES: tl.constexpr, GROUP_LANES: tl.constexpr,
):  # fmt: skip
    """Grid: tokens. Lanes are [groups, experts of a group]."""
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUP_LANES)[:, None], tl.arange(0, SIZE_LANES)[None, :]
    valid = (group < GROUPS) & (member < SIZE)
    expert = group * SIZE + member
    x = tl.load(logits + token * (GROUPS * SIZE) + expert, mask=valid, other=-float("inf"))
    if SOFTMAX:
        powers = tl.exp(x - tl.max(tl.max(x, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-x))
    ranks = scores
    if correction is not None:
        ranks += tl.load(correction + expert, mask=valid, other=0.0)
    if GROUPS > 1:
        keys = tl.where(valid, _keys(ranks, member, SIZE_LANES), MIN_KEY)
        quality = tl.zeros((GROUP_LANES, 1), tl.float32)
        for _ in tl.static_range(GROUP_BEST):
            best = keys == tl.max(keys, 1)[:, None]
            quality += tl.sum(tl.where(best, ranks, 0.0), 1)[:, None]
            keys = tl.where(best, MIN_KEY, keys)
        group_keys = tl.where(group < GROUPS, _keys(quality, group, GROUP_LANES), MIN_KEY)
        is_kept = group_keys == MIN_KEY
        for _ in tl.static_range(KEPT_GROUPS):
            best = group_keys == tl.max(group_keys, 0)[None, :]
            is_kept = is_kept | best
            group_keys = tl.where(best, MIN_KEY, group_keys)
        ranks = tl.where(is_kept, ranks, -float("inf"))
    lanes = group * SIZE_LANES + member
    keys = tl.where(valid, _keys(ranks, lanes, GROUP_LANES * SIZE_LANES), MIN_KEY)
    for _ in tl.static_range(TOP_K):
        keys = tl.where(keys == tl.max(tl.max(keys, 1), 0), MIN_KEY, keys)
    is_chosen = (keys == MIN_KEY) & valid
    if NORMALIZED:
        total = tl.sum(tl.sum(tl.where(is_chosen, scores, 0.0), 1), 0)
        scores = scores / (total + MIN_SUM)
    count = is_chosen.to(tl.int32)
    group_counts = tl.sum(count, 1)
    rank = (tl.cumsum(group_counts, 0) - group_counts)[:, None] + tl.cumsum(count, 1) - count
    index = token * TOP_K + rank
    tl.store(chosen + index, expert, mask=is_chosen)
    tl.store(weights + index, scores * scale, mask=is_chosen)
