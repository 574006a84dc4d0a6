"""Computes top_k, top_p and min_p on the device: for each sample (one stream's next token) with
such a filter, the floor below which its logits / T are excluded.

Both top_k and top_p need the largest float such that enough tokens, or enough probability mass, lie
on or above it. One program per sample searches between `low`, which has enough, and `high`, which
has not, both as integers in the order of the floats. It guesses a float in between and gathers the
scores from there to `high`. Once these are at most BLOCK and enough, the search continues in
registers. A wrong guess costs one more pass over the row and never changes the result.

Masses are sums of doubles in an order that depends only on the row. The reference sums in another
order: the two floors may differ only where a running sum is within 1e-12 of top_p.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.sampling.records import (
    LOG_MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    field,
    scores_of,
)
from pdserve.kernels.cuda.sampling.samples import Survey

BLOCK = 4096  # at most this many tokens have a probability of 2^-12 or more
LOWEST = tl.constexpr(-2139095041)  # order_of(-inf)
STEP = tl.constexpr(0.7)  # about ln 2: the first step down from a guess that was too high


@triton.jit
def order_of(x):
    """Map floats to int32 numbers of the same order; -0.0 equals 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    return ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)


@triton.jit
def _weights(scaled, inside, peak, MASS: tl.constexpr):
    """Return the weight of each score in the search: 1 for top_k; for top_p (MASS), its probability
    times a constant."""
    if MASS:
        weights = tl.exp(scaled.to(tl.float64) - peak.to(tl.float64))
    else:
        weights = tl.full(scaled.shape, 1.0, tl.float64)
    return tl.where(inside, weights, 0.0)


@triton.jit
def _scaled(scores, ids, vocab, temperature):
    x = tl.load(scores + ids, mask=ids < vocab, other=float("-inf"))
    return tl.math.div_rn(x, temperature)


@triton.jit
def _gather(scores, vocab, temperature, low, high, gathered, BLOCK: tl.constexpr):
    """Count the scores / T of one sample that are in [low, high), and store the first BLOCK of them
    in `gathered`."""
    tl.debug_barrier()  # all threads have read the previous content of `gathered`
    count = 0
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scaled = _scaled(scores, ids, vocab, temperature)
        order = order_of(scaled)
        inside = (ids < vocab) & (order >= low) & (order < high)
        num_in_tile = tl.sum(inside.to(tl.int32), 0)
        if num_in_tile > 0:
            index = count + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(gathered + index, scaled, mask=inside & (index < BLOCK))
        count += num_in_tile
    tl.debug_barrier()
    return count


@triton.jit
def _gathered(gathered, count, peak, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Load the gathered scores; return them as int32 in the order of the floats, and their
    weights."""
    index = tl.arange(0, BLOCK)
    scaled = tl.load(gathered + index, mask=index < count, other=float("-inf"))
    return order_of(scaled), _weights(scaled, index < count, peak, MASS)


@triton.jit
def _measure(
    scores,
    vocab,
    temperature,
    peak,
    low,
    high,
    gathered,
    count,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the total weight of the `count` scores in [low, high). The scores are in `gathered` if
    they are at most BLOCK."""
    weight = count.to(tl.float64)
    if MASS:
        if count <= BLOCK:
            _, weights = _gathered(gathered, count, peak, MASS, BLOCK)
            weight = tl.sum(weights, 0)
        else:
            sums = tl.zeros([BLOCK], tl.float64)
            for start in range(0, vocab, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                scaled = _scaled(scores, ids, vocab, temperature)
                order = order_of(scaled)
                inside = (ids < vocab) & (order >= low) & (order < high)
                sums += _weights(scaled, inside, peak, MASS)
            weight = tl.sum(sums, 0)
    return weight


@triton.jit
def _descend(order, weights, low, high, above, target):
    """Find the largest float in [low, high) such that the weights of scores on or above it add up
    to at least `target`; `above` is the weight from `high` on. Floats are int32 in their order."""
    while low + 1 < high:
        middle = _middle(low, high)
        weight = above + tl.sum(tl.where(order >= middle, weights, 0.0), 0)
        low = tl.where(weight >= target, middle, low)
        high = tl.where(weight >= target, high, middle)
    return low


@triton.jit
def _floor(
    scores,
    vocab,
    temperature,
    peak,
    low,
    guess,
    target,
    gathered,
    count,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the largest float, as an int32 in the order of the floats, such that the weights of
    scores on or above it add up to at least `target`. `low` has enough weight, or no float has. If
    count <= BLOCK, the scores from `low` on are already gathered.

    Scores equal to `low` are not examined, because there may be many scores of -inf.
    """
    # Whether a guess has had enough: until then, guesses go down in growing steps.
    has_lower_bound = 0
    high = order_of(peak) + 1
    above = tl.full((), 0.0, tl.float64)
    step = tl.full((), STEP, tl.float32)
    turn = 0
    while (count > BLOCK) & (low + 1 < high):
        guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        num_gathered = _gather(scores, vocab, temperature, guess, high, gathered, BLOCK)
        weight = above + _measure(
            scores, vocab, temperature, peak, guess, high, gathered, num_gathered, MASS, BLOCK
        )
        if weight >= target:
            low = guess
            count = num_gathered
            has_lower_bound = 1
        else:
            high = guess
            above = weight
        if has_lower_bound == 0:
            guess = order_of(value_of(high) - step)
            step *= 2
        elif turn % 2 == 0:
            guess = order_of(value_of(low) * 0.5 + value_of(high) * 0.5)
        else:
            guess = _middle(low, high)
        turn += 1
    order, weights = _gathered(gathered, tl.minimum(count, BLOCK), peak, MASS, BLOCK)
    return _descend(order, weights, low, high, above, target)


@triton.jit
def _guess_kth(scores, vocab, temperature, k, BLOCK: tl.constexpr):
    """Estimate from a sample of the scores a float that well over k scores reach, but likely fewer
    than BLOCK."""
    stride = (vocab + BLOCK - 1) // BLOCK
    ids = tl.arange(0, BLOCK) * stride
    order = order_of(_scaled(scores, ids, vocab, temperature))
    target = tl.maximum(k.to(tl.float32), tl.sqrt(k.to(tl.float32) * (BLOCK // 2)))
    rank = tl.floor(target / stride).to(tl.float64) + 1
    weights = (ids < vocab).to(tl.float64)
    zero = tl.full((), 0.0, tl.float64)
    return _descend(order, weights, tl.full((), LOWEST, tl.int32), tl.max(order, 0) + 1, zero, rank)


@triton.jit
def floors_kernel(
    records,
    filtered_samples,
    logits,
    stride,
    edited_scores,
    vocab,
    num_tiles,
    best,
    mass,
    gathered,
    floors,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the floor of one sample with filters: tokens whose logit / T is below the floor are
    excluded."""
    slot = tl.program_id(0).to(tl.int64)
    sample = tl.load(filtered_samples + slot).to(tl.int64)
    gathered += slot * BLOCK
    temperature = field(records, sample, TEMPERATURE, tl.float32)
    tiles = tl.arange(0, TILES)
    index = sample * num_tiles + tiles
    tops = tl.load(best + index, mask=tiles < num_tiles, other=float("-inf"))
    tops = tl.math.div_rn(tops, temperature)
    peak = tl.max(tops, 0)
    if (peak > float("-inf")) & (peak < float("inf")):
        scores = scores_of(records, sample, logits, stride, edited_scores, vocab)
        low = tl.full((), LOWEST, tl.int32)
        top_k = field(records, sample, TOP_K, tl.int32)
        top_p = field(records, sample, TOP_P, tl.float64)
        unknown_count = tl.full((), BLOCK + 1, tl.int32)
        narrowed = (top_k > 0) & (top_k < vocab)
        if narrowed:
            guess = low
            if vocab > BLOCK:
                guess = _guess_kth(scores, vocab, temperature, top_k, BLOCK)
            low = _floor(
                scores,
                vocab,
                temperature,
                peak,
                low,
                guess,
                top_k.to(tl.float64),
                gathered,
                unknown_count,
                False,
                BLOCK,
            )
        if top_p < 1:
            count = unknown_count
            if narrowed | (vocab <= BLOCK):
                high = order_of(peak) + 1
                count = _gather(scores, vocab, temperature, low, high, gathered, BLOCK)
                total = _measure(
                    scores, vocab, temperature, peak, low, high, gathered, count, True, BLOCK
                )
            else:
                sums = tl.load(mass + index, mask=tiles < num_tiles, other=0.0)
                total = tl.sum(sums * _weights(tops, tiles < num_tiles, peak, True), 0)
            lowest = peak + tl.log(total.to(tl.float32)) - 12 * 0.6931472
            low = _floor(
                scores,
                vocab,
                temperature,
                peak,
                low,
                order_of(lowest),
                top_p * total,
                gathered,
                count,
                True,
                BLOCK,
            )
        floor = tl.maximum(value_of(low), peak + field(records, sample, LOG_MIN_P, tl.float32))
        tl.store(floors + sample, tl.minimum(floor, peak))


def floors_of(survey: Survey, filtered_samples: Tensor) -> Tensor:
    """Compute the floors of `filtered_samples`, int32 [n]: tokens whose logit / T is below the
    floor are excluded. Returns float32 [samples]; the floors of other samples are undefined."""
    num_samples, num_filtered, device = len(survey.best), len(filtered_samples), survey.best.device
    floors = torch.empty(num_samples, device=device)
    gathered = torch.empty(num_filtered, BLOCK, device=device)
    floors_kernel[(num_filtered,)](
        survey.records,
        filtered_samples,
        *survey.scores,
        survey.num_tiles,
        survey.best,
        survey.mass,
        gathered,
        floors,
        TILES=triton.next_power_of_2(survey.num_tiles),
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return floors
