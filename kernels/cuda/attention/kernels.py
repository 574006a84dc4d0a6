"""The Triton kernels of paged attention.

Either each program of `attend_kernel` processes the splits of its keys one after the other, or each
program of `split_kernel` processes one split and `merge_kernel` merges them (Flash-Decoding). All
kernels must be launched with enable_fp_fusion=False: fused operations are explicit fma calls.
"""

import triton
import triton.language as tl

from pdserve.kernels.cuda.attention.tiles import (
    attend_split,
    load_part,
    load_queries,
    merge,
    no_split,
    store_result,
    store_values,
)


@triton.jit(do_not_specialize=["starts", "kv_lens", "tiles", "table", "table_stride", "window"])
def attend_kernel(
    q,  # [T, H, D], of stride q_stride
    kv,  # [blocks, planes, K, BLOCK, D], of strides block_stride, plane_stride (0: one plane)
    out,  # [T, H, D or LATENT]
    table,  # [rows, columns], of stride table_stride
    starts,
    kv_lens,
    tiles,  # [tiles, 2], row and first token of TOKENS; None: the only token of each row
    sinks,  # [H] or None
    q_stride,
    block_stride,
    plane_stride,
    table_stride,
    window,
    inner,
    factor,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    CAPPED: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    MAIN: tl.constexpr,
    SIDE: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (N columns of a tile of tokens, kv head) processes all splits in sequence."""
    PARTS: tl.constexpr = (TOKENS * GROUP + N - 1) // N
    tile, kv_head = tl.program_id(0) // PARTS, tl.program_id(1)
    if tiles is None:
        row, first_token = tile, 0
    else:
        row, first_token = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + row)
    num_tokens = tl.load(starts + row + 1) - start
    first_column = first_token * GROUP + tl.program_id(0) % PARTS * N
    end_column = tl.minimum(num_tokens, first_token + TOKENS) * GROUP
    if first_column >= end_column:
        return
    column = first_column + tl.arange(0, N)
    token, head, used = column // GROUP, column % GROUP, column < end_column
    num_before = tl.load(kv_lens + row) - num_tokens
    low = tl.maximum(num_before + first_column // GROUP - window + 1, 0)
    end = num_before + (tl.minimum(first_column + N, end_column) - 1) // GROUP + 1
    q_rows = (start + token).to(tl.int64) * q_stride + (kv_head * GROUP + head) * D
    q_main, q_side = load_queries(q, q_rows, used, D, LATENT, MAIN, SIDE)
    keys = kv + kv_head * BLOCK * D
    blocks = table + tl.cast(row, tl.int64) * table_stride
    peak, total, main, side = no_split(LATENT, MAIN, SIDE, N)
    for split_begin in range(low // SPLIT * SPLIT, end, SPLIT):
        split_peak, split_total, split_main, split_side = attend_split(
            q_main,
            q_side,
            keys,
            keys + plane_stride,
            blocks,
            block_stride,
            tl.maximum(split_begin, low // TILE * TILE),
            low,
            tl.minimum(split_begin + SPLIT, end),
            num_before + token,
            window,
            inner,
            factor,
            CAPPED,
            LATENT,
            BLOCK,
            D,
            MAIN,
            SIDE,
            N,
            TILE,
        )
        peak, total, main, side = merge(
            peak, total, main, side, split_peak, split_total, split_main, split_side
        )
    # Reloaded, so that the loop keeps no registers for it.
    start_column = tl.load(starts + row, volatile=True) * GROUP + first_column
    column = start_column + tl.arange(0, N)
    head = kv_head * GROUP + column % GROUP
    used = column < start_column - first_column + end_column
    heads = (column // GROUP).to(tl.int64) * (tl.num_programs(1) * GROUP) + head
    if sinks is not None:
        sinks += head
    store_result(out, heads, sinks, used, peak, total, main, side, D, LATENT, MAIN, SIDE)


@triton.jit(do_not_specialize=["kv_lens", "table", "table_stride", "window"])
def split_kernel(
    q,
    kv,
    stats,  # [rows, H, splits, 2]: largest score and sum of weights
    sums,  # [rows, H, splits, D or LATENT]
    table,
    kv_lens,
    q_stride,
    block_stride,
    plane_stride,
    table_stride,
    window,
    inner,
    factor,
    GROUP: tl.constexpr,
    CAPPED: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    MAIN: tl.constexpr,
    SIDE: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (N columns of a row's only token, kv head, split); split 0 holds the first visible
    key."""
    PARTS: tl.constexpr = (GROUP + N - 1) // N
    row, kv_head, split = tl.program_id(0) // PARTS, tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + row)
    low = tl.maximum(kv_len - window, 0)
    split_begin = (low // SPLIT + split) * SPLIT
    if split_begin >= kv_len:
        return
    head = tl.program_id(0) % PARTS * N + tl.arange(0, N)
    used = head < GROUP
    q_rows = row.to(tl.int64) * q_stride + (kv_head * GROUP + head) * D
    q_main, q_side = load_queries(q, q_rows, used, D, LATENT, MAIN, SIDE)
    keys = kv + kv_head * BLOCK * D
    peak, total, main, side = attend_split(
        q_main,
        q_side,
        keys,
        keys + plane_stride,
        table + row.to(tl.int64) * table_stride,
        block_stride,
        tl.maximum(split_begin, low // TILE * TILE),
        low,
        tl.minimum(split_begin + SPLIT, kv_len),
        tl.full((N,), 0, tl.int32) + (kv_len - 1),
        window,
        inner,
        factor,
        CAPPED,
        LATENT,
        BLOCK,
        D,
        MAIN,
        SIDE,
        N,
        TILE,
    )
    heads = (row.to(tl.int64) * tl.num_programs(1) + kv_head) * GROUP + head
    index = heads * tl.num_programs(2) + split
    tl.store(stats + index * 2, peak, mask=used)
    tl.store(stats + index * 2 + 1, total, mask=used)
    store_values(sums, index, used, main, side, D, LATENT, MAIN, SIDE)


@triton.jit(do_not_specialize=["kv_lens", "num_splits", "window"])
def merge_kernel(
    stats,
    sums,
    out,
    kv_lens,
    sinks,
    num_splits,
    window,
    LATENT: tl.constexpr,
    D: tl.constexpr,
    MAIN: tl.constexpr,
    SIDE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (row, query head) merges the splits that `split_kernel` stored."""
    VALUE: tl.constexpr = LATENT if LATENT else D
    FIRST: tl.constexpr = MAIN if MAIN < VALUE else VALUE
    row, head = tl.program_id(0), tl.program_id(1)
    kv_len = tl.load(kv_lens + row)
    first = tl.maximum(kv_len - window, 0) // SPLIT
    heads = row.to(tl.int64) * tl.num_programs(1) + head + tl.arange(0, 1)
    used = tl.full((1,), True, tl.int1)
    peak, total, main, side = no_split(LATENT, MAIN, SIDE, 1)
    for split in range(tl.cdiv(kv_len, SPLIT) - first):
        index = heads * num_splits + split
        split_main = tl.trans(load_part(sums, index * VALUE, used, FIRST, MAIN))
        split_side = side
        if SIDE and not LATENT:
            split_side = tl.trans(load_part(sums + MAIN, index * VALUE, used, D - MAIN, SIDE))
        peak, total, main, side = merge(
            peak,
            total,
            main,
            side,
            tl.load(stats + index * 2),
            tl.load(stats + index * 2 + 1),
            split_main,
            split_side,
        )
    if sinks is not None:
        sinks += head + tl.arange(0, 1)
    store_result(out, heads, sinks, used, peak, total, main, side, D, LATENT, MAIN, SIDE)
