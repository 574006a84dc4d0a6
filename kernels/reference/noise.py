"""Gumbel noise as a function of (seed, choice, position, token id), bit-identical on all backends.

A counter hash in 64-bit integers gives 32 random bits; u = (bits + 1/2) / 2**32 and
g = -log(-log(u)) are computed with additions, multiplications and divisions of IEEE doubles, each
rounded separately (no fused multiply-add, no library logarithm), in the order used here. A backend
that follows this order gets the same floats. The hash chains the finalizer of SplitMix64 (Steele,
Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
LN2 = 0.6931471805599453
SQRT2 = 1.4142135623730951
# log((1 + s) / (1 - s)) = 2 s (1 + z/3 + z^2/5 + ...), z = s^2 <= 0.0295: 11 terms reach 2^-53.
SERIES = tuple(1.0 / (2 * i + 1) for i in range(11))


def gumbel_noise(seeds: Tensor, choices: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return Gumbel noise, float32 [B, vocab], for int64 seeds, choices and positions [B]."""
    ids = torch.arange(vocab, device=seeds.device)
    return gumbel_at(seeds, choices, positions, ids.expand(len(seeds), vocab))


def gumbel_at(seeds: Tensor, choices: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return the noise of some token ids only: int64 [B, n] -> float32 [B, n]."""
    u = _uniform(seeds, choices, positions, token_ids)
    return (-_log(-_log(u))).to(torch.float32)


def gumbel_argmax(scores: Tensor, seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """Return the argmax over the vocabulary of scores + gumbel_noise; ties go to the lowest id.

    scores float32 [B, vocab], finite or -inf with a finite maximum -> int64 [B]. The exact noise is
    computed only for tokens that may win according to the library's logarithm, whose error is far
    below the margin.
    """
    winners = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    ids = torch.arange(scores.shape[1], device=scores.device)[None]
    for row in range(len(scores)):  # the temporaries of one row fit into the CPU cache
        row_slice = slice(row, row + 1)
        noise = _uniform(seeds[row_slice], choices[row_slice], positions[row_slice], ids)
        noise.log_().neg_().log_().neg_()
        approximate = noise.add_(scores[row_slice])
        best = approximate.max()
        margin = 1e-3 + 1e-5 * scores[row_slice].max().abs()
        contenders = (approximate[0] >= best - margin).nonzero()[:, 0]
        exact = scores[row, contenders] + gumbel_at(
            seeds[row_slice], choices[row_slice], positions[row_slice], contenders[None]
        ).squeeze(0)
        winners[row] = contenders[exact.argmax()]
    return winners


def _uniform(seeds: Tensor, choices: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return float64 in (0, 1), each exactly (bits + 1/2) / 2**32."""
    key = _mix(seeds + GOLDEN)
    key = _mix((key ^ choices) + GOLDEN)
    key = _mix((key ^ positions) + GOLDEN)
    bits = _shift(_mix(key[:, None] + (token_ids + 1) * GOLDEN), 32)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-32)


def _shift(x: Tensor, count: int) -> Tensor:
    """Shift int64 right as if unsigned."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer; products wrap modulo 2**64."""
    x = _shift(x, 30).bitwise_xor_(x).mul_(MULTIPLIER_1)
    x = _shift(x, 27).bitwise_xor_(x).mul_(MULTIPLIER_2)
    return _shift(x, 31).bitwise_xor_(x)


def _log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive normal doubles, to a few units in the last place."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)  # [1, 2)
    high = mantissa > SQRT2
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    k = (exponent + high.to(torch.int64)).to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    p = torch.full_like(z, SERIES[-1])
    for coefficient in SERIES[-2::-1]:
        p = p * z
        p = p + coefficient
    return k * LN2 + (2.0 * s) * p
