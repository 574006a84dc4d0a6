"""The Triton kernels of paged attention. They share functions, so that all of them give a token the
same bits.

Either each program of `attend_kernel` processes the splits of its keys one after the other, or each
program of `split_kernel` processes one split and `merge_kernel` merges them (Flash-Decoding). All
kernels must be launched with enable_fp_fusion=False: fused operations are explicit fma calls.

Scores are S^T = K Q^T, keys by columns, and results O^T += V^T P^T, values by columns. A column is
one query head of one token, so a tile of columns only groups independent sums. Keys are processed
in tiles of TILE at absolute positions, and tiles in splits. Each split starts with an empty state
(`attend_split`), and the states are merged in ascending order (`merge`). A key that a column does
not see has weight exactly 0, and so has a tile of such keys. The online softmax is
FlashAttention-2's (arXiv:2307.08691), in powers of two.

A head is computed in one or two parts, of MAIN and SIDE values including padding to powers of two;
SIDE is 0 if there is one part. Unless LATENT is 0, the last LATENT values of a key are its value
and its main part.
"""

import triton
import triton.language as tl

NO_SCORE = tl.constexpr(float("-inf"))  # the score of no key
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _finite(peak):
    return tl.where(peak == NO_SCORE, 0.0, peak)


@triton.jit
def load_part(base, rows, used, LENGTH: tl.constexpr, PADDED: tl.constexpr):
    """Load one part of heads as [rows, PADDED]: the LENGTH values of each row, then zeros; unused
    rows are 0."""
    d = tl.arange(0, PADDED)
    mask = used[:, None]
    if LENGTH < PADDED:
        mask = mask & (d < LENGTH)[None, :]
    return tl.load(base + rows[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _load_main(base, rows, used, D: tl.constexpr, LATENT: tl.constexpr, MAIN: tl.constexpr):
    if LATENT:
        return load_part(base + (D - LATENT), rows, used, LATENT, MAIN)
    else:
        return load_part(base, rows, used, MAIN if MAIN < D else D, MAIN)


@triton.jit
def _load_side(
    base, rows, used, D: tl.constexpr, LATENT: tl.constexpr, MAIN: tl.constexpr, SIDE: tl.constexpr
):
    if LATENT:
        return load_part(base, rows, used, D - LATENT, SIDE)
    else:
        return load_part(base + MAIN, rows, used, D - MAIN, SIDE)


@triton.jit
def _store_part(base, columns, used, value, LENGTH: tl.constexpr, PADDED: tl.constexpr):
    """Store the first LENGTH values of each column of `value` [PADDED, columns], for the columns in
    use."""
    d = tl.arange(0, PADDED)
    mask = used[None, :]
    if LENGTH < PADDED:
        mask = mask & (d < LENGTH)[:, None]
    tl.store(base + columns[None, :] + d[:, None], value, mask=mask)


@triton.jit
def store_values(
    base,
    heads,
    used,
    main,
    side,
    D: tl.constexpr,
    LATENT: tl.constexpr,
    MAIN: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Store the main part [MAIN, N] and side part [SIDE, N] of results as [heads, values]."""
    if LATENT:
        _store_part(base, heads * LATENT, used, main, LATENT, MAIN)
    else:
        _store_part(base, heads * D, used, main, MAIN if MAIN < D else D, MAIN)
        if SIDE:
            _store_part(base + MAIN, heads * D, used, side, D - MAIN, SIDE)


@triton.jit
def no_split(LATENT: tl.constexpr, MAIN: tl.constexpr, SIDE: tl.constexpr, N: tl.constexpr):
    """Return the state of the online softmax before any key: largest score [N], sum of weights [N],
    sums of weighted values [MAIN, N] and [SIDE, N] (unused if values have one part)."""
    OTHER: tl.constexpr = 16 if LATENT or not SIDE else SIDE
    peak = tl.full((N,), NO_SCORE, tl.float32)
    total = tl.zeros((N,), tl.float32)
    return peak, total, tl.zeros((MAIN, N), tl.float32), tl.zeros((OTHER, N), tl.float32)


@triton.jit
def attend_split(
    q_main,  # [N, MAIN]
    q_side,  # [N, SIDE]
    keys,  # of one kv head, in block 0
    values,
    blocks,  # the row's part of the block table
    block_stride,
    first,  # position of the first tile
    low,  # [low, end): the keys that any column sees
    end,
    position,  # [N]
    window,
    inner,  # score: product * factor, or tanh(product * inner) * factor, in powers of two
    factor,
    CAPPED: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    MAIN: tl.constexpr,
    SIDE: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend over the keys of one split; return the state of the online softmax, like
    `no_split`."""
    dtype: tl.constexpr = q_main.dtype
    peak, total, main, side = no_split(LATENT, MAIN, SIDE, N)
    for tile_begin in range(first, end, TILE):
        key = tile_begin + tl.arange(0, TILE)
        valid = (key >= low) & (key < end)
        block = tl.load(blocks + key // BLOCK, mask=valid, other=0).to(tl.int64)
        rows = block * block_stride + (key % BLOCK) * D
        k = _load_main(keys, rows, valid, D, LATENT, MAIN).to(dtype)
        score = tl.dot(k, tl.trans(q_main), input_precision="ieee")  # [TILE, N]
        if SIDE:
            k_side = _load_side(keys, rows, valid, D, LATENT, MAIN, SIDE).to(dtype)
            score = tl.dot(k_side, tl.trans(q_side), score, input_precision="ieee")
        if CAPPED:
            score = 1.0 - 2.0 / (tl.exp2(score * inner) + 1.0)  # tanh
        seen = (position[None, :] - key[:, None]).to(tl.uint32) < window
        score = tl.where(seen, score, NO_SCORE)
        previous_peak = peak
        peak = tl.maximum(previous_peak, tl.max(score, 0) * factor)
        shift = _finite(peak)
        decay = tl.exp2(previous_peak - shift)
        weight = tl.exp2(tl.fma(score, factor, -shift[None, :]))
        total = tl.fma(total, decay, tl.sum(weight, 0))
        weight = weight.to(dtype)
        v = k if LATENT else _load_main(values, rows, valid, D, LATENT, MAIN).to(dtype)
        main = tl.dot(tl.trans(v), weight, main * decay[None, :], input_precision="ieee")
        if SIDE and not LATENT:
            v_side = _load_side(values, rows, valid, D, LATENT, MAIN, SIDE).to(dtype)
            side = tl.dot(tl.trans(v_side), weight, side * decay[None, :], input_precision="ieee")
    return peak, total, main, side


@triton.jit
def merge(peak, total, main, side, split_peak, split_total, split_main, split_side):
    """Merge the softmax state of a later split into the state of the earlier splits."""
    highest = tl.maximum(peak, split_peak)
    shift = _finite(highest)
    scale, split_scale = tl.exp2(peak - shift), tl.exp2(split_peak - shift)
    total = tl.fma(total, scale, split_total * split_scale)
    main = tl.fma(main, scale[None, :], split_main * split_scale[None, :])
    side = tl.fma(side, scale[None, :], split_side * split_scale[None, :])
    return highest, total, main, side


@triton.jit
def store_result(
    out,
    heads,  # [N] int64
    sinks,  # of these heads, or None
    used,
    peak,
    total,
    main,
    side,
    D: tl.constexpr,
    LATENT: tl.constexpr,
    MAIN: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Add the sinks to the sum of weights, divide the weighted values by it and store the result.
    Columns without any key are 0."""
    factor = tl.full(peak.shape, 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks, mask=used, other=0.0) * LOG2_E
        highest = tl.maximum(peak, sink)
        factor = tl.exp2(peak - highest)
        total = tl.fma(total, factor, tl.exp2(sink - highest))
    factor = tl.where(total == 0.0, 0.0, factor / total)
    dtype: tl.constexpr = out.dtype.element_ty
    main, side = (main * factor[None, :]).to(dtype), (side * factor[None, :]).to(dtype)
    store_values(out, heads, used, main, side, D, LATENT, MAIN, SIDE)


@triton.jit
def load_queries(
    q, rows, used, D: tl.constexpr, LATENT: tl.constexpr, MAIN: tl.constexpr, SIDE: tl.constexpr
):
    main = _load_main(q, rows, used, D, LATENT, MAIN)
    if SIDE:
        return main, _load_side(q, rows, used, D, LATENT, MAIN, SIDE)
    else:
        return main, main


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
    """Attend over all splits of the keys in sequence, and store the result. Grid: N columns of a
    tile of tokens, kv heads."""
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
    """Attend over one split of the keys for rows with one token, and store the split's state. Grid:
    N columns of a row's token, kv heads, splits; split 0 holds the first visible key."""
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
    """Merge the states that `split_kernel` stored, and store the result. Grid: rows, query
    heads."""
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
