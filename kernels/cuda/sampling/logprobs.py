"""Log-probabilities on the device, from unedited logits: two launches, one copy back.

Sums are doubles in an order that depends only on the vocabulary. NaN counts as the largest; a row
with a NaN has only NaN log-probabilities.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.sampling_ops import TokenScores

TILE = 2048


@triton.jit
def best_kernel(logits, stride, vocab, count, best, best_id, mass, TILE: tl.constexpr):
    """Write the best scores in one tile of one row of logits with their ids, best first, ties to
    the lowest id, and the sum of exp(score - the tile's best). NaN is the best score, and its sum
    is NaN."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = row * tl.num_programs(0) + tile
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    x = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    top = tl.max(tl.where(x == x, x, float("inf")), 0)
    peak = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
    tl.store(mass + index, tl.sum(tl.exp(x.to(tl.float64) - peak.to(tl.float64)), 0))
    # Integers in the order of the floats, NaN above all; -1 << 31 marks taken scores.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    used = tl.full((), -(1 << 31), tl.int32)
    order = tl.where(inside, order, used)
    for i in range(tl.maximum(count, 1)):
        highest = tl.max(order, 0)
        first = tl.min(tl.where((order == highest) & (highest > used), ids, vocab), 0)
        tl.store(best + index * tl.maximum(count, 1) + i, highest)
        tl.store(best_id + index * tl.maximum(count, 1) + i, first)
        order = tl.where(ids == first, used, order)


@triton.jit
def scores_kernel(
    logits,
    stride,
    num_tiles,
    count,
    num_also,
    best,
    best_id,
    mass,
    token_ids,
    also_ids,
    out,
    TILES: tl.constexpr,
    ENTRIES: tl.constexpr,
    ALSO: tl.constexpr,
):
    """Write one row of `out`: the log-probability of the row's token, the `count` best ids, their
    log-probabilities, and those of the ids also_ids."""
    row = tl.program_id(0).to(tl.int64)
    out += row * (1 + 2 * count + num_also)
    per_tile = tl.maximum(count, 1)
    tiles = tl.arange(0, TILES)
    tops = tl.load(
        best + (row * num_tiles + tiles) * per_tile, mask=tiles < num_tiles, other=-(1 << 31)
    )
    tops = (tops ^ ((tops >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tops = tl.where(tiles < num_tiles, tops, float("-inf"))
    sums = tl.load(mass + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    nan = tl.max((tops != tops).to(tl.int32), 0) > 0
    peak = tl.max(tl.where(tops == tops, tops, float("inf")), 0)
    finite = (peak > float("-inf")) & (peak < float("inf"))
    base = tl.where(finite, peak, 0.0).to(tl.float64)
    # A tile without a finite score summed to 0 relative to 0.
    scale = tl.exp(tl.where(tops > float("-inf"), tops, base.to(tl.float32)).to(tl.float64) - base)
    total = base + tl.log(tl.sum(sums * scale, 0))
    total = tl.where(finite, total, peak.to(tl.float64))
    total = tl.where(nan, float("nan"), total)

    token_score = tl.load(logits + row * stride + tl.load(token_ids + row)).to(tl.float64)
    tl.store(out, token_score - total)
    if count > 0:
        entries = tl.arange(0, ENTRIES)
        valid = entries < num_tiles * count
        index = row * num_tiles * count + entries
        used = tl.full((), -(1 << 31), tl.int32)
        order = tl.load(best + index, mask=valid, other=-(1 << 31))
        ids = tl.load(best_id + index, mask=valid, other=0x7FFFFFFF)
        for i in range(count):
            highest = tl.max(order, 0)
            first = tl.min(tl.where((order == highest) & (highest > used), ids, 0x7FFFFFFF), 0)
            value = (highest ^ ((highest >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            tl.store(out + 1 + i, first.to(tl.float64))
            tl.store(out + 1 + count + i, value.to(tl.float64) - total)
            order = tl.where(ids == first, used, order)
    also = tl.arange(0, ALSO)
    has_id = also < num_also
    ids = tl.load(also_ids + also, mask=has_id, other=0)
    value = tl.load(logits + row * stride + ids, mask=has_id, other=0.0).to(tl.float64)
    tl.store(out + 1 + 2 * count + also, value - total, mask=has_id)


@torch.inference_mode()
def launch(logits: Tensor, ids: Tensor, count: int) -> Tensor:
    """Launch both kernels; return doubles [rows, 1 + 2 * count + also], whose columns
    `scores_kernel` describes.

    `ids` int32: a token per row, then `also`. logits float32 [rows, vocab], adjacent columns.
    """
    rows, vocab = logits.shape
    num_tiles, num_also = triton.cdiv(vocab, TILE), len(ids) - rows
    shape = rows, num_tiles, max(count, 1)
    best = torch.empty(shape, dtype=torch.int32, device=logits.device)
    best_id = torch.empty_like(best)
    mass = torch.empty(shape[:2], dtype=torch.float64, device=logits.device)
    out = torch.empty(rows, 1 + 2 * count + num_also, dtype=torch.float64, device=logits.device)
    best_kernel[num_tiles, rows](
        logits,
        logits.stride(0),
        vocab,
        count,
        best,
        best_id,
        mass,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    scores_kernel[(rows,)](
        logits,
        logits.stride(0),
        num_tiles,
        count,
        num_also,
        best,
        best_id,
        mass,
        ids[:rows],
        ids[rows:],
        out,
        TILES=triton.next_power_of_2(num_tiles),
        ENTRIES=triton.next_power_of_2(num_tiles * max(count, 1)),
        ALSO=triton.next_power_of_2(max(num_also, 1)),
        num_warps=8,
        enable_fp_fusion=False,
    )
    return out


def logprobs(
    logits: Tensor, tokens: Sequence[int], count: int, also: Sequence[int] = ()
) -> list[TokenScores]:
    """Return for each row r of raw logits [rows, vocab] the log-probability of tokens[r], of the
    row's `count` best tokens and of the ids `also`. Raises ValueError for ids or counts out of
    range."""
    rows, vocab = logits.shape
    if len(tokens) != rows:
        raise ValueError("tokens: expected one for each row of logits")
    if not 0 <= count <= vocab:
        raise ValueError(f"count: must be 0 to {vocab}, the size of the vocabulary, not {count}")
    for name, ids in (("tokens", tokens), ("also", also)):
        if ids and not (min(ids) >= 0 and max(ids) < vocab):
            raise ValueError(f"{name}: an id is outside the vocabulary of {vocab}")
    if not rows:
        return []
    uploaded = torch.tensor([*tokens, *also], dtype=torch.int32)
    if logits.is_cuda:
        uploaded = uploaded.pin_memory()
    results = launch(logits, uploaded.to(logits.device, non_blocking=True), count).tolist()
    answers: list[TokenScores] = []
    for token_logprob, *rest in results:
        best = zip(map(int, rest[:count]), rest[count : 2 * count], strict=True)
        answers.append((token_logprob, (*best, *zip(also, rest[2 * count :], strict=True))))
    return answers
