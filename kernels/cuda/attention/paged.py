"""Paged attention on a GPU, in Triton: a token's result is bit-identical in every batch.

The result depends on the query, on the visible keys and values and on their positions; not on other
rows, on chunk borders, or on the kernel that computes it. No function here waits for the device,
and grids depend only on host data, so launches can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.cuda.attention.kernels import attend_kernel, merge_kernel, split_kernel

SPLIT = 256  # keys
LATENT_SPLIT = 1024  # keys; many heads share them, so smaller splits write mostly partial results
TOKENS = 64  # per tile of Rows.tiles; with all heads of a group, they fill the columns
HEAD_STEP = 16  # head_dim is a multiple of this
MAX_HEAD_DIM = 512  # also for latent values; the limit is shared memory
LOG2_E = 1.4426950408889634
NO_WINDOW = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step on the device, one row per sequence; shared by all layers with the same
    block table."""

    block_table: Tensor  # int32 or int64 [rows, max_blocks]
    starts: Tensor  # int32 [rows + 1]
    kv_lens: Tensor  # int32 [rows]
    tiles: Tensor  # int32 [tiles, 2]: row, and the first of at most TOKENS of its tokens
    num_decode_rows: int  # the first rows, with one token each
    max_kv_len: int  # upper bound for the decode rows; programs past a row's end exit at once


def chunk_tiles(
    starts: tuple[int, ...], kv_lens: tuple[int, ...], num_decode_rows: int
) -> NDArray[np.int64]:
    """Divide the tokens of a step's prefill rows into tiles and return Rows.tiles. The arguments
    are those of `reference.paged_attention`. Tiles with the most keys come first, so that no long
    tile runs alone at the end."""
    tiles = []
    for row in range(num_decode_rows, len(kv_lens)):
        num_tokens = starts[row + 1] - starts[row]
        for first in range(0, num_tokens, TOKENS):
            tiles.append((kv_lens[row] - num_tokens + first, row, first))
    tiles.sort(reverse=True)
    return np.array([tile[1:] for tile in tiles], np.int64).reshape(-1, 2)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    rows: Rows,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    latent: int = 0,
) -> Tensor:
    """Compute causal attention like `reference.paged_attention`, with keys and values cast to q's
    dtype. q [T, H, D] may be a view of longer rows. With kv [blocks, 1, K, block_size, D], the last
    `latent` numbers of a key are its value, or all of them if `latent` is 0. Returns [T, H, latent
    or D], with 0 for rows without keys. Raises ValueError for arguments that do not match.
    """
    _check(q, kv, rows.block_table, scale, latent)
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // kv.shape[2]
    shape = _shape(head_dim, latent, q.dtype, kv.dtype)
    if soft_cap:
        inner, factor = 2 * LOG2_E * scale / soft_cap, LOG2_E * soft_cap
    else:
        inner, factor = 0.0, LOG2_E * scale
    out = torch.empty(num_tokens, num_heads, latent or head_dim, dtype=q.dtype, device=q.device)
    strides = (
        q.stride(0),
        kv.stride(0),
        kv.stride(1) if kv.shape[1] == 2 else 0,
        rows.block_table.stride(0),
    )
    score_arguments = (window or NO_WINDOW, inner, factor)
    parts = {"D": head_dim, "LATENT": latent, "MAIN": shape.main, "SIDE": shape.side}
    constants = {
        "GROUP": group,
        "CAPPED": bool(soft_cap),
        "BLOCK": kv.shape[3],
        "TILE": shape.tile,
        "SPLIT": shape.split,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
        "enable_fp_fusion": False,
        **parts,
    }
    decode_columns = min(shape.columns, 16 if group <= 16 else 32)  # columns for one token
    # With 16 columns and no limit, ptxas spills values to run more programs at once.
    max_registers = {16: 255, 32: None}

    def attend(tiles: Tensor | None, num_tiles: int, tokens: int, columns: int) -> None:
        grid = (num_tiles * -(-tokens * group // columns), kv.shape[2])
        attend_kernel[grid](
            q,
            kv,
            out,
            rows.block_table,
            rows.starts,
            rows.kv_lens,
            tiles,
            sinks,
            *strides,
            *score_arguments,
            TOKENS=tokens,
            N=columns,
            maxnreg=max_registers[columns],
            **constants,
        )

    if len(rows.tiles):
        attend(rows.tiles, len(rows.tiles), TOKENS, shape.columns)
    max_visible = min(rows.max_kv_len, window or NO_WINDOW)
    if rows.num_decode_rows and max_visible <= shape.split:
        attend(None, rows.num_decode_rows, 1, decode_columns)
    elif rows.num_decode_rows:
        num_splits = _num_splits(rows.max_kv_len, window, shape.split)
        split_shape = (rows.num_decode_rows, num_heads, num_splits)
        stats = torch.empty(*split_shape, 2, dtype=torch.float32, device=q.device)
        sums = torch.empty(*split_shape, out.shape[2], dtype=torch.float32, device=q.device)
        grid = (rows.num_decode_rows * -(-group // decode_columns), kv.shape[2], num_splits)
        split_kernel[grid](
            q,
            kv,
            stats,
            sums,
            rows.block_table,
            rows.kv_lens,
            *strides,
            *score_arguments,
            N=decode_columns,
            maxnreg=max_registers[decode_columns],
            **constants,
        )
        merge_kernel[rows.num_decode_rows, num_heads](
            stats,
            sums,
            out,
            rows.kv_lens,
            sinks,
            num_splits,
            window or NO_WINDOW,
            SPLIT=shape.split,
            enable_fp_fusion=False,
            **parts,
        )
    return out


def _check(q: Tensor, kv: Tensor, table: Tensor, scale: float, latent: int) -> None:
    if table.stride(1) != 1:
        raise ValueError(f"block_table: columns must be contiguous, strides are {table.stride()}")
    _, num_heads, head_dim = q.shape
    _, planes, kv_heads, block_size, kv_dim = kv.shape
    if q.stride()[1:] != (head_dim, 1):
        raise ValueError(f"q: the heads of a token must be contiguous, strides are {q.stride()}")
    if kv.stride()[2:] != (block_size * kv_dim, kv_dim, 1):
        raise ValueError(f"kv: a block's keys must be contiguous, strides are {kv.stride()}")
    if kv_dim != head_dim or head_dim % HEAD_STEP:
        raise ValueError(
            f"head_dim: {head_dim} in q, {kv_dim} in kv: expected the same multiple of 16"
        )
    if num_heads % kv_heads:
        raise ValueError(f"kv: {num_heads} query heads are not a multiple of {kv_heads} kv heads")
    if planes != 1 and (planes != 2 or latent):
        raise ValueError(
            f"kv: {planes} planes with latent {latent}: expected 1, or 2 if latent is 0"
        )
    if latent % 16 or not 0 <= latent <= head_dim:
        raise ValueError(f"latent: {latent} is not a multiple of 16 up to head_dim {head_dim}")
    if (latent or head_dim) > MAX_HEAD_DIM:
        raise ValueError(f"head_dim: {latent or head_dim} exceeds the limit of {MAX_HEAD_DIM}")
    if scale <= 0:
        raise ValueError(f"scale: {scale} is not positive")


def _num_splits(max_kv_len: int, window: int, split: int) -> int:
    """Return the largest number of splits with visible keys that a row of up to `max_kv_len` keys
    can have."""
    total = -(-max_kv_len // split)
    return min(total, (window + split - 2) // split + 1) if window else total


@dataclass(frozen=True, slots=True)
class _Shape:
    """Tile sizes of the attention kernels for one head size. All but the last two fields affect the
    sums, so they are the same for every step; the last two are chosen to compile without register
    spills."""

    main: int
    side: int
    tile: int  # keys; 64 are the rows of a warp group's product
    split: int  # keys
    num_warps: int
    columns: int  # at most, per tile
    num_stages: int


def _shape(head_dim: int, latent: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> _Shape:
    if latent:
        main, side = _padded(latent, 64), _padded(head_dim - latent, 16)
    else:
        main = max(64, 1 << head_dim.bit_length() - 1)
        side = _padded(head_dim - main, 64)
        if side == main:
            main, side = 2 * main, 0
    is_long, exact = main + side > 128, dtype == torch.float32
    num_stages = 3 if dtype == kv_dtype else 2  # with 3, the block table is also a stage ahead
    return _Shape(
        main,
        side,
        tile=(16 if is_long else 32) if exact else 64,
        split=LATENT_SPLIT if latent else SPLIT,
        num_warps=8 if is_long or exact else 4,
        columns=16 if is_long or exact or kv_dtype == torch.float32 else 32,
        num_stages=1 if exact or (main > 256 and not latent) else num_stages,
    )


def _padded(length: int, minimum: int) -> int:
    """Round a length up to a power of two, at least `minimum`; return 0 for length 0 or below."""
    return max(minimum, 1 << (length - 1).bit_length()) if length > 0 else 0
