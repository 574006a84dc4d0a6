"""A mixture of experts in Triton: routing, grouping, products, combination. The host never waits.

`choose` routes each token to experts; each program handles one token, so other tokens never affect
its sums. `group` sorts the (token, expert) pairs by expert, by a counting sort whose result does
not depend on the order of execution. `grouped_product` multiplies tokens with the matrices of their
experts, all experts in one launch. A product is bit-identical to `linear` with the expert's matrix,
since the splits and sums are the same; one program adds all splits of its tile, because the experts
give enough programs. `combine` adds up the results of a token's experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.linear import (
    LARGEST,
    SIDE,
    DeviceMatrix,
    ProductTarget,
    Tiles,
    finish,
    register_limit,
    row_sum,
    splits_of,
    tall_tiles,
    target_of,
    tiles_of_width,
    width_of,
)

FEW_PAIRS, MANY_PAIRS = 1024, 4096  # pairs read per step of a program
TILE_LANES: tl.constexpr = tl.constexpr(64)


@dataclass(frozen=True)
class Groups:
    """The (token, expert) pairs of a step sorted by expert, then token, and divided into tiles of
    one expert each. All tensors are int32."""

    pairs: Tensor  # [pairs]: token * top_k + rank
    places: Tensor  # [tokens, top_k]: position of each pair in `pairs`
    ends: Tensor  # [experts]: end of each expert's pairs
    tile_experts: Tensor  # [tiles]; -1: unused tile
    tile_firsts: Tensor  # [tiles]: first pair of each tile
    tile_tokens: int  # max pairs per tile

    @property
    def top_k(self) -> int:
        return self.places.shape[1]


def group(chosen: Tensor, experts: int, tile_tokens: int) -> Groups:
    """Sort the (token, expert) pairs by expert. `chosen` has the distinct experts of each token,
    contiguous int32 [tokens, top_k]. Raises ValueError for another dtype or layout."""
    if chosen.dtype != torch.int32 or not chosen.is_contiguous():
        raise ValueError(
            f"chosen are {chosen.dtype}, strides {chosen.stride()}, expected contiguous int32"
        )

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=chosen.device)

    count = chosen.numel()
    tiles = max_tiles(count, experts, tile_tokens)
    groups = Groups(
        numbers(count),
        numbers(*chosen.shape),
        numbers(experts),
        numbers(tiles),
        numbers(tiles),
        tile_tokens,
    )
    if count:
        block = FEW_PAIRS if count <= FEW_PAIRS else MANY_PAIRS
        _group[(experts,)](
            chosen,
            groups.pairs,
            groups.places,
            groups.ends,
            groups.tile_experts,
            groups.tile_firsts,
            count,
            tiles,
            experts,
            TILE=tile_tokens,
            BINS=triton.next_power_of_2(experts),
            BLOCK=block,
            num_warps=4 if block == FEW_PAIRS else 8,
        )
    return groups


def max_tiles(pairs: int, experts: int, tile_tokens: int) -> int:
    """Return the largest number of tiles that `pairs` pairs can need, however they are spread over
    experts."""
    used_experts = min(pairs, experts)
    return used_experts + (pairs - used_experts) // tile_tokens


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _group(
    chosen, pairs, places, ends, tile_experts, tile_firsts, num_pairs, num_tiles, experts,
    TILE: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sort pairs for `group`. Grid: experts. Each program counts the pairs of all experts and
    places the pairs of its expert."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros((BINS,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        valid = begin + lanes < num_pairs
        experts_read = tl.load(chosen + begin + lanes, mask=valid, other=0)
        counts += tl.histogram(experts_read, BINS, mask=valid)
    bins = tl.arange(0, BINS)
    tiles = (counts + (TILE - 1)) // TILE
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    end = tl.sum(tl.where(bins <= expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    end_tile = tl.sum(tl.where(bins <= expert, tiles, 0), 0)
    tl.store(ends + expert, end)
    next_index = first
    for begin in range(0, num_pairs, BLOCK):
        valid = begin + lanes < num_pairs
        is_own = tl.load(chosen + begin + lanes, mask=valid, other=-1) == expert
        index = next_index + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(pairs + index, begin + lanes, mask=is_own)
        tl.store(places + begin + lanes, index, mask=is_own)
        next_index += tl.sum(is_own.to(tl.int32), 0)
    # The last expert fills the rest.
    tiles_end = tl.where(expert == experts - 1, num_tiles, end_tile)
    for begin in range(first_tile, tiles_end, TILE_LANES):
        tile = begin + tl.arange(0, TILE_LANES)
        tl.store(tile_experts + tile, tl.where(tile < end_tile, expert, -1), mask=tile < tiles_end)
        tl.store(tile_firsts + tile, first + (tile - first_tile) * TILE, mask=tile < end_tile)


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
    """Choose each token's experts by logits, float32 [T, experts], and correction, [experts].
    Returns the experts, int32 [T, top_k] in ascending order, and their weights, float32 [T, top_k].
    Source: arXiv:2412.19437, 2.1.2.

    The best sums of score and correction win, ties go to the first expert; ExpertRouting in
    engine/models/parts.py defines the rule. NaN counts as the largest logit. Raises ValueError for
    arguments that do not match.
    """
    tokens, experts = logits.shape
    size = experts // groups
    if top_k > experts or size * groups != experts or group_best > size or kept_groups > groups:
        raise ValueError(
            f"{top_k} of {experts} experts cannot be chosen from {kept_groups} of {groups} groups "
            f"by {group_best} scores"
        )
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(
            f"logits are {logits.dtype}, strides {logits.stride()}, expected contiguous float32"
        )
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
    """Return int64 sort keys in the order of float values; of equal values, the first has the
    largest key."""
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
    """Choose the experts of one token for `choose`. Grid: tokens. Lanes are [groups, experts of a
    group]."""
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


@dataclass(frozen=True)
class MatrixStack:
    """One matrix of each of several experts, all of one shape and layout, contiguous in memory."""

    first: DeviceMatrix
    tensors: tuple[Tensor | None, ...]  # values, scales, zeros of all matrices; [matrices, ...]
    numbers: Tensor  # int32 [experts]: the matrix of each expert; -1: not in this stack


def tile_tokens(stacks: Iterable[MatrixStack], pairs: int, experts: int) -> int:
    """Return how many (token, expert) pairs are in one tile, the same for all `stacks`."""
    return min(
        tile_width(stack.first, pairs, experts, target_of(stack.numbers.device)) for stack in stacks
    )


def tile_width(
    matrix: DeviceMatrix, pairs: int, experts: int, target: ProductTarget = LARGEST
) -> int:
    """Return the number of pairs per tile: room for twice the mean number of pairs per expert, so
    that the weights of most experts are read once. The width never affects results. Before Hopper,
    wider tiles of scattered tokens need too many registers."""
    max_width = 128 if target.is_hopper else 64
    return min(width_of(matrix, 2 * pairs // experts, target), max_width)


def tiles_of_group(matrix: DeviceMatrix, width: int, target: ProductTarget = LARGEST) -> Tiles:
    """Return the tiling of grouped products whose tiles have `width` pairs."""
    return tiles_of_width(matrix, width, tall_tiles(matrix, width), True, target)


def grouped_product(
    x: Tensor,
    stack: MatrixStack,
    groups: Groups,
    bias: Tensor | None,
    out: Tensor,
    *,
    by_pair: bool,
    tiles: Tiles | None = None,
) -> None:
    """Multiply each pair's x with the matrix of its expert, transposed, add the expert's row of
    bias [experts, rows], and write the results into out [pairs, rows]. Pairs whose expert is not in
    the stack are skipped.

    x is [pairs, cols] in group order if `by_pair`, else [tokens, cols]. `tiles` overrides the
    tiling, to compile for another device. Raises ValueError for arguments that do not match.
    """
    matrix, pairs = stack.first, len(groups.pairs)
    rows, experts = matrix.rows, len(stack.numbers)
    inputs = pairs if by_pair else len(groups.places)
    if x.shape != (inputs, matrix.cols) or x.dtype != matrix.dtype or x.stride(1) != 1:
        raise ValueError(
            f"x is {list(x.shape)} {x.dtype}, strides {x.stride()}, "
            f"expected [{inputs}, {matrix.cols}] {matrix.dtype}"
        )
    if out.shape != (pairs, rows) or out.stride(1) != 1:
        raise ValueError(
            f"out is {list(out.shape)}, strides {out.stride()}, expected [{pairs}, {rows}]"
        )
    if len(groups.ends) != experts:
        raise ValueError(f"groups have {len(groups.ends)} experts, expected the stack's {experts}")
    if bias is not None and (bias.shape != (experts, rows) or bias.stride(1) != 1):
        raise ValueError(f"bias is {list(bias.shape)}, expected [{experts}, {rows}]")
    if not pairs:
        return
    tiles = tiles or tiles_of_group(matrix, groups.tile_tokens, target_of(x.device))
    first = (matrix.values, matrix.scales, matrix.zeros)
    row_strides = tuple(0 if tensor is None else tensor.stride(0) for tensor in first)
    strides = tuple(0 if tensor is None else tensor.stride(0) for tensor in stack.tensors)
    splits, split_blocks = splits_of(matrix)
    num_tiles = len(groups.tile_experts)
    _grouped[(-(-rows // tiles.rows) * num_tiles,)](
        x,
        stack.tensors,
        row_strides,
        matrix.group_blocks,
        strides,
        stack.numbers,
        groups.tile_experts,
        groups.tile_firsts,
        groups.ends,
        None if by_pair else groups.pairs,
        bias,
        out,
        num_tiles,
        rows,
        matrix.cols,
        x.stride(0),
        out.stride(0),
        0 if bias is None else bias.stride(0),
        matrix.blocks,
        split_blocks,
        splits,
        TOP_K=groups.top_k,
        LAYOUT=matrix.layout,
        BM=tiles.rows,
        BN=groups.tile_tokens,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=255 if groups.tile_tokens >= 64 else register_limit(tiles, x.dtype),
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_tiles", "blocks", "split_blocks", "splits"])
def _grouped(
    x, tensors, row_strides, group_blocks, strides, numbers, tile_experts, tile_firsts, ends, pairs,
    bias, out, num_tiles, rows, cols, x_stride, out_stride, bias_stride, blocks, split_blocks,
    splits, TOP_K: tl.constexpr, LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `grouped_product`. Grid: row tiles times tiles of pairs, in runs of SIDE
    row tiles."""
    run = tl.program_id(0) // (SIDE * num_tiles)
    program = tl.program_id(0) % (SIDE * num_tiles)
    side = tl.minimum(tl.cdiv(rows, BM) - run * SIDE, SIDE)
    row, tile = (run * SIDE + program % side) * BM, program // side
    expert = tl.load(tile_experts + tile)
    number = tl.load(numbers + expert, mask=expert >= 0, other=-1)
    if number >= 0:
        place = tl.load(tile_firsts + tile) + tl.arange(0, BN)[None, :]
        valid = place < tl.load(ends + expert)
        token = place
        if pairs is not None:
            token = tl.load(pairs + place, mask=valid, other=0) // TOP_K
        values, scales, zeros = tensors
        value_stride, scale_stride, zero_stride = strides
        values += number.to(tl.int64) * value_stride
        if scales is not None:
            scales += number.to(tl.int64) * scale_stride
        if zeros is not None:
            zeros += number.to(tl.int64) * zero_stride
        weights = (values, scales, zeros)
        total = row_sum(
            splits, split_blocks, blocks, row, x + token.to(tl.int64) * x_stride, valid, rows, cols,
            weights, row_strides, group_blocks, LAYOUT, BM, BN,
        )  # fmt: skip
        r = row + tl.arange(0, BM)[:, None]
        if bias is not None:
            bias += expert.to(tl.int64) * bias_stride
        total = finish(total, bias, r, r < rows)
        index = place.to(tl.int64) * out_stride + r
        tl.store(out + index, total.to(out.dtype.element_ty), mask=(r < rows) & valid)


BLOCK = 1024


def combine(
    results: Tensor,
    weights: Tensor,
    groups: Groups,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Add up the results of each token's experts, [pairs, N] in group order, times float32 weights
    [T, top_k], in rank order. Then add the shared expert's result [T, N], if given, times the
    sigmoid of its float32 gate [T, 1], if given. Returns [T, N]. Weights, products and sums are
    rounded to the dtype of the results."""
    tokens, size = len(weights), results.shape[1]
    out = torch.empty((tokens, size), dtype=results.dtype, device=results.device)
    if tokens:
        _combine[(tokens, triton.cdiv(size, BLOCK))](
            results,
            weights,
            groups.places,
            shared,
            gate,
            out,
            size,
            TOP_K=groups.top_k,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _times(value, factor, dtype: tl.constexpr):
    """Multiply a value by a factor; the factor and the product are rounded to `dtype`."""
    return (value.to(tl.float32) * factor.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _combine(
    results, weights, places, shared, gate, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute one block of columns of one token for `combine`. Grid: tokens, blocks of columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    dtype: tl.constexpr = out.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + rank).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + rank)
        result = tl.load(results + place * size + column, mask=inside, other=0.0)
        total = (total + _times(result, weight, dtype)).to(dtype).to(tl.float32)
    if shared is not None:
        result = tl.load(shared + token * size + column, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            result = _times(result, 1.0 / (1.0 + tl.exp(-tl.load(gate + token))), dtype)
        total = total + result
    tl.store(out + token * size + column, total.to(dtype), mask=inside)
