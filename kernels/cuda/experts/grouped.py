"""Products of tokens with the matrices of their experts, all experts in one launch, in Triton.

A product has the bits that `linear` gives of the expert's matrix alone: the same splits, the same
sums. One program adds all splits of its tile, since the experts are enough programs.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.experts.grouping import Groups
from pdserve.kernels.cuda.linear.packing import DeviceMatrix
from pdserve.kernels.cuda.linear.product import SIDE, finish, row_sum
from pdserve.kernels.cuda.linear.tiles import (
    LARGEST,
    ProductTarget,
    Tiles,
    register_limit,
    splits_of,
    tall_tiles,
    target_of,
    tiles_of_width,
    width_of,
)


@dataclass(frozen=True)
class MatrixStack:
    """Matrices of one shape and layout, one after the other in memory."""

    first: DeviceMatrix
    tensors: tuple[Tensor | None, ...]  # of all: values, scales, zeros; [matrices, ...]
    numbers: Tensor  # int32 [experts]: which matrix is an expert's; -1: none of these


def tile_tokens(stacks: Iterable[MatrixStack], pairs: int, experts: int) -> int:
    """How many pairs of a token and an expert share a tile."""
    return min(
        tile_width(stack.first, pairs, experts, target_of(stack.numbers.device)) for stack in stacks
    )


def tile_width(
    matrix: DeviceMatrix, pairs: int, experts: int, target: ProductTarget = LARGEST
) -> int:
    """Enough for twice the mean of an expert, so that most experts' weights are read once. It
    changes no bit of a result. Before Hopper a wider tile of scattered tokens has too few
    registers."""
    most = 128 if target.is_hopper else 64
    return min(width_of(matrix, 2 * pairs // experts, target), most)


def tiles_of_group(matrix: DeviceMatrix, width: int, target: ProductTarget = LARGEST) -> Tiles:
    """How products are cut whose tiles have `width` tokens."""
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
    """Writes into out [pairs, rows] each pair's x times its expert's matrix, transposed, plus the
    expert's row of bias [experts, rows]. Pairs of experts that the stack has not are left alone.

    x is [pairs, cols] in the order of the groups if `by_pair`, and else [tokens, cols]. `tiles` is
    for those that compile for another device. Raises ValueError for what does not fit together.
    """
    matrix, pairs = stack.first, len(groups.pairs)
    rows, experts = matrix.rows, len(stack.numbers)
    inputs = pairs if by_pair else len(groups.places)
    if x.shape != (inputs, matrix.cols) or x.dtype != matrix.dtype or x.stride(1) != 1:
        raise ValueError(
            f"x is {list(x.shape)} {x.dtype}, strides {x.stride()}, not [{inputs}, {matrix.cols}] "
            f"{matrix.dtype}"
        )
    if out.shape != (pairs, rows) or out.stride(1) != 1:
        raise ValueError(f"out is {list(out.shape)}, strides {out.stride()}, not [{pairs}, {rows}]")
    if len(groups.ends) != experts:
        raise ValueError(f"groups of {len(groups.ends)} experts for matrices of {experts}")
    if bias is not None and (bias.shape != (experts, rows) or bias.stride(1) != 1):
        raise ValueError(f"bias is {list(bias.shape)}, not [{experts}, {rows}]")
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
    """Grid: row tiles times tiles of pairs, in runs of SIDE tiles of rows."""
    run = tl.program_id(0) // (SIDE * num_tiles)
    within = tl.program_id(0) % (SIDE * num_tiles)
    side = tl.minimum(tl.cdiv(rows, BM) - run * SIDE, SIDE)
    row, tile = (run * SIDE + within % side) * BM, within // side
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
        at = place.to(tl.int64) * out_stride + r
        tl.store(out + at, total.to(out.dtype.element_ty), mask=(r < rows) & valid)
