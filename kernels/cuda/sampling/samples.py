"""Samples the next token of each stream on the device: the argmax of scores, or of scores / T +
Gumbel noise. A sample is the choice of one stream's next token.

Programs over tiles of the vocabulary find each tile's best score and, for samples with a
temperature, an upper bound of score + noise in the tile. One program per sample then computes the
noise in doubles for the tile with the highest bound, and for others only while their bound reaches
the best sum. Sums are monotonic under rounding, so a skipped tile cannot win. The sample is
therefore exactly the reference's, does not depend on the tiles, and ties go to the lowest id.

The noise has the bits of kernels/reference/sampling.py. Kernels that call `noise_of` must be
launched with enable_fp_fusion=False, so that each addition and multiplication is rounded
separately. A division of doubles is div.rn.f64, which uses fused operations but returns the
correctly rounded quotient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.sampling.records import (
    CHOICE,
    POSITION,
    SEED,
    TEMPERATURE,
    TOP_P,
    field,
    is_filtered,
    scores_of,
)

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
LN2 = tl.constexpr(0.6931471805599453)
SQRT2 = tl.constexpr(1.4142135623730951)
LAST = tl.constexpr(10)  # of the series 1, 1/3, 1/5, ...


@triton.jit
def _mix(x):
    """Apply the finalizer of the hash SplitMix64 to uint64 numbers."""
    x = (x ^ (x >> 30)) * MULTIPLIER_1
    x = (x ^ (x >> 27)) * MULTIPLIER_2
    return x ^ (x >> 31)


@triton.jit
def noise_key(records, sample):
    """Return the key of a sample's noise: a uint64 hash of its seed, choice and position."""
    key = _mix(field(records, sample, SEED, tl.uint64) + GOLDEN)
    key = _mix((key ^ field(records, sample, CHOICE, tl.uint64)) + GOLDEN)
    return _mix((key ^ field(records, sample, POSITION, tl.uint64)) + GOLDEN)


@triton.jit
def noise_bits(key, token_ids):
    """Return the random bits of each token id under a sample's key, uint32."""
    return (_mix(key + (token_ids + 1).to(tl.uint64) * GOLDEN) >> 32).to(tl.uint32)


@triton.jit
def _log(x):
    """Return the logarithm of positive normal doubles, with the reference's operations in the same
    order, so that the bits are equal."""
    bits = x.to(tl.int64, bitcast=True)
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).to(tl.float64, bitcast=True)
    high = mantissa > tl.full((), SQRT2, tl.float64)  # Triton compares bare numbers as float32
    mantissa = tl.where(high, mantissa * 0.5, mantissa)
    k = ((bits >> 52).to(tl.int32) - 1023 + high.to(tl.int32)).to(tl.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    p = tl.full(z.shape, 1.0 / (2 * LAST + 1), tl.float64)
    for i in tl.static_range(LAST):
        p = p * z
        p = p + 1.0 / (2 * (LAST - 1 - i) + 1)
    return k * LN2 + (2.0 * s) * p


@triton.jit
def noise_of(bits):
    """Convert random uint32 bits to Gumbel noise, float32, bit-identical to the reference."""
    u = (bits.to(tl.float64) + 0.5) * (2.0**-32)
    return (-_log(-_log(u))).to(tl.float32)


@triton.jit
def noise_bound(bits):
    """Return an upper bound of `noise_of` that is cheaper to compute, at most 0.085 too high for
    noise from 3 to 18.

    With v = 1 - u: -log(-log(u)) <= -log(v). `half` is 2^31 v rounded down, and log2(half) is at
    least exponent + fraction, the value of a float's bits read as an integer. 2e-4 covers rounding
    here and in `noise_of`: half as a float has a relative error of 2^-24, its bits as a float one
    of 2^6 units of 2^-23, and the sum 2^-19. half = 0 gives 109; the largest noise is 22.9.
    """
    half = ((bits ^ 0xFFFFFFFF) >> 1).to(tl.int32).to(tl.float32)
    log2 = half.to(tl.int32, bitcast=True).to(tl.float32)
    return log2 * (-0.6931471805599453 / 8388608) + (158 * 0.6931471805599453 + 2e-4)


TILE = 2048


@triton.jit
def survey_kernel(
    records, logits, stride, edited_scores, vocab, best, best_id, mass, bound, TILE: tl.constexpr
):
    """Process one tile of the vocabulary for one sample: write the tile's best score (inf for NaN)
    and the lowest id with it.

    With top_p, also write the sum of exp(score / T - the tile's best / T); with a temperature and
    no filter, the bound of score / T + noise.
    """
    tile, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = sample * tl.num_programs(0) + tile
    ids = tile * TILE + tl.arange(0, TILE)
    scores = scores_of(records, sample, logits, stride, edited_scores, vocab)
    x = tl.load(scores + ids, mask=ids < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 0)
    tl.store(best + index, top)
    tl.store(best_id + index, tl.min(tl.where(x == top, ids, vocab), 0))
    temperature = field(records, sample, TEMPERATURE, tl.float32)
    if temperature > 0:
        scaled = tl.math.div_rn(x, temperature)
        if is_filtered(records, sample):
            if field(records, sample, TOP_P, tl.float64) < 1:
                peak = tl.math.div_rn(top, temperature)
                peak = tl.where(peak == float("-inf"), 0.0, peak).to(tl.float64)
                tl.store(mass + index, tl.sum(tl.exp(scaled.to(tl.float64) - peak), 0))
        else:
            bounds = scaled + noise_bound(noise_bits(noise_key(records, sample), ids))
            tl.store(bound + index, tl.max(bounds, 0))


@triton.jit
def bound_kernel(
    records,
    filtered_samples,
    floors,
    logits,
    stride,
    edited_scores,
    vocab,
    bound,
    TILE: tl.constexpr,
):
    """Write an upper bound of score / T + noise over those tokens in one tile that a sample's
    filters keep."""
    tile, slot = tl.program_id(0), tl.program_id(1)
    sample = tl.load(filtered_samples + slot).to(tl.int64)
    ids = tile * TILE + tl.arange(0, TILE)
    scores = scores_of(records, sample, logits, stride, edited_scores, vocab)
    x = tl.load(scores + ids, mask=ids < vocab, other=float("-inf"))
    scaled = tl.math.div_rn(x, field(records, sample, TEMPERATURE, tl.float32))
    is_candidate = scaled >= tl.load(floors + sample)
    tile_bound = tl.full((), float("-inf"), tl.float32)
    if tl.max(is_candidate.to(tl.int32), 0) > 0:
        noise = noise_bound(noise_bits(noise_key(records, sample), ids))
        tile_bound = tl.max(tl.where(is_candidate, scaled + noise, float("-inf")), 0)
    tl.store(bound + sample * tl.num_programs(0) + tile, tile_bound)


@triton.jit
def choose_kernel(
    records,
    floors,
    logits,
    stride,
    edited_scores,
    vocab,
    num_tiles,
    best,
    best_id,
    bound,
    tokens,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Choose the token of one sample; -1 if the sample's best score is not finite."""
    sample = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    valid = tiles < num_tiles
    index = sample * num_tiles + tiles
    tops = tl.load(best + index, mask=valid, other=float("-inf"))
    top = tl.max(tops, 0)
    token = tl.min(
        tl.where(tops == top, tl.load(best_id + index, mask=valid, other=vocab), vocab), 0
    )
    finite = (top > float("-inf")) & (top < float("inf"))
    temperature = field(records, sample, TEMPERATURE, tl.float32)
    if finite & (temperature > 0):
        floor = tl.load(floors + sample, mask=is_filtered(records, sample), other=float("-inf"))
        scores = scores_of(records, sample, logits, stride, edited_scores, vocab)
        key = noise_key(records, sample)
        bounds = tl.load(bound + index, mask=valid, other=float("-inf"))
        max_bound = tl.max(bounds, 0)
        value = tl.full((), float("-inf"), tl.float32)
        while (max_bound > float("-inf")) & (max_bound >= value):
            tile = tl.min(tl.where(bounds == max_bound, tiles, TILES), 0)
            ids = tile * TILE + tl.arange(0, TILE)
            x = tl.load(scores + ids, mask=ids < vocab, other=float("-inf"))
            scaled = tl.math.div_rn(x, temperature)
            noisy = scaled + noise_of(noise_bits(key, ids))
            noisy = tl.where((ids < vocab) & (scaled >= floor), noisy, float("-inf"))
            tile_best = tl.max(noisy, 0)
            first = tl.min(tl.where(noisy == tile_best, ids, vocab), 0)
            wins = (tile_best > value) | ((tile_best == value) & (first < token))
            token = tl.where(wins, first, token)
            value = tl.where(wins, tile_best, value)
            bounds = tl.where(tiles == tile, float("-inf"), bounds)
            max_bound = tl.max(bounds, 0)
    tl.store(tokens + sample, tl.where(finite, token, -1))


class Survey:
    """The samples of a step, and what the kernels found in each tile of the vocabulary, such as its
    best score: tensors [samples, tiles] on the device."""

    def __init__(
        self, records: Tensor, logits: Tensor, edited_scores: Tensor, vocab: int, num_samples: int
    ) -> None:
        """Launch `survey_kernel`, which reads the scores of every sample once."""
        device = logits.device
        self.records = records
        self.scores = logits, logits.stride(0), edited_scores, vocab  # arguments of each kernel
        self.num_tiles = triton.cdiv(vocab, TILE)
        shape = num_samples, self.num_tiles
        self.best = torch.empty(shape, device=device)
        self.best_id = torch.empty(shape, dtype=torch.int32, device=device)
        self.mass = torch.empty(shape, dtype=torch.float64, device=device)
        self.bound = torch.empty(shape, device=device)
        survey_kernel[self.num_tiles, num_samples](
            records,
            *self.scores,
            self.best,
            self.best_id,
            self.mass,
            self.bound,
            TILE=TILE,
            num_warps=4,
            enable_fp_fusion=False,
        )

    def bound_filtered(self, filtered_samples: Tensor, floors: Tensor) -> None:
        """Launch `bound_kernel` for the filtered samples, int32 [n]; `floors` float32 [samples] are
        the lowest scores / T that their filters keep."""
        bound_kernel[self.num_tiles, len(filtered_samples)](
            self.records,
            filtered_samples,
            floors,
            *self.scores,
            self.bound,
            TILE=TILE,
            num_warps=4,
            enable_fp_fusion=False,
        )

    def choose(self, floors: Tensor) -> Tensor:
        """Choose the token of each sample, int32 [samples]."""
        num_samples = len(self.best)
        tokens = torch.empty(num_samples, dtype=torch.int32, device=self.best.device)
        choose_kernel[(num_samples,)](
            self.records,
            floors,
            *self.scores,
            self.num_tiles,
            self.best,
            self.best_id,
            self.bound,
            tokens,
            TILES=triton.next_power_of_2(self.num_tiles),
            TILE=TILE,
            num_warps=8,
            enable_fp_fusion=False,
        )
        return tokens
