"""Products of tokens with the matrices of their experts, all experts in one launch, in Triton.

A product is bit-identical to `linear` with the expert's matrix: the splits and sums are the same.
One program adds all splits of its tile, because the experts give enough programs.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.experts.grouping import Groups
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


@dataclass(frozen=True)
class MatrixStack:
    """Matrices of one shape and layout, contiguous in memory."""

    first: DeviceMatrix
    tensors: tuple[Tensor | None, ...]  # values, scales, zeros of all matrices; [matrices, ...]
    numbers: Tensor  # int32 [experts]: the matrix of each expert; -1: not in this stack


def tile_tokens(stacks: Iterable[MatrixStack], pairs: int, experts: int) -> int:
    """Return how many (token, expert) pairs share a tile."""
    return min(
        tile_width(stack.first, pairs, experts, target_of(stack.numbers.device)) for stack in stacks
    )


def tile_width(
    matrix: DeviceMatrix, pairs: int, experts: int, target: ProductTarget = LARGEST
) -> int:
    """Return a width for twice the mean number of pairs per expert, so that the weights of most
    experts are read once. The width never affects results. Before Hopper, wider tiles of scattered
    tokens need too many registers."""
    max_width = 128 if target.is_hopper else 64
    return min(width_of(matrix, 2 * pairs // experts, target), max_width)


def tiles_of_group(matrix: DeviceMatrix, width: int, target: ProductTarget = LARGEST) -> Tiles:
    """Return the tiling of products whose tiles have `width` tokens."""
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
    """Write into out [pairs, rows] each pair's x times its expert's matrix, transposed, plus the
    expert's row of bias [experts, rows]. Skip pairs whose expert is not in the stack.

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
        raise ValueError(f"groups have {len(groups.ends)} experts, expected {experts}")
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
    """Grid: row tiles times tiles of pairs, in runs of SIDE row tiles."""
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
