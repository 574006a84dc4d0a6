"""Gumbel noise on the device: the bits of kernels/reference/sampling.py, and a cheap bound.

Kernels that call `noise_of` must be launched with enable_fp_fusion=False, so that each addition and
multiplication is rounded separately. A division of doubles is div.rn.f64, which uses fused
operations but returns the correctly rounded quotient.
"""

import triton
import triton.language as tl

from pdserve.kernels.cuda.sampling.records import CHOICE, POSITION, SEED, field

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
LN2 = tl.constexpr(0.6931471805599453)
SQRT2 = tl.constexpr(1.4142135623730951)
LAST = tl.constexpr(10)  # of the series 1, 1/3, 1/5, ...


@triton.jit
def _mix(x):
    """Apply SplitMix64's finalizer to uint64."""
    x = (x ^ (x >> 30)) * MULTIPLIER_1
    x = (x ^ (x >> 27)) * MULTIPLIER_2
    return x ^ (x >> 31)


@triton.jit
def noise_key(records, pick):
    """Return a uint64 hash of the pick's seed, choice and position."""
    key = _mix(field(records, pick, SEED, tl.uint64) + GOLDEN)
    key = _mix((key ^ field(records, pick, CHOICE, tl.uint64)) + GOLDEN)
    return _mix((key ^ field(records, pick, POSITION, tl.uint64)) + GOLDEN)


@triton.jit
def noise_bits(key, token_ids):
    """Return 32 random bits per token id, uint32."""
    return (_mix(key + (token_ids + 1).to(tl.uint64) * GOLDEN) >> 32).to(tl.uint32)


@triton.jit
def _log(x):
    """Return the reference's logarithm of positive normal doubles, in the same operation order."""
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
    """Return the noise of uint32 bits, float32, bit-identical to the reference."""
    u = (bits.to(tl.float64) + 0.5) * (2.0**-32)
    return (-_log(-_log(u))).to(tl.float32)


@triton.jit
def noise_bound(bits):
    """Return an upper bound of `noise_of`, at most 0.085 too high for noise from 3 to 18.

    With v = 1 - u: -log(-log(u)) <= -log(v). `half` is 2^31 v rounded down, and log2(half) is at
    least exponent + fraction, the value of a float's bits read as an integer. 2e-4 covers rounding
    here and in `noise_of`: half as a float has a relative error of 2^-24, its bits as a float one
    of 2^6 units of 2^-23, and the sum 2^-19. half = 0 gives 109; the largest noise is 22.9.
    """
    half = ((bits ^ 0xFFFFFFFF) >> 1).to(tl.int32).to(tl.float32)
    log2 = half.to(tl.int32, bitcast=True).to(tl.float32)
    return log2 * (-0.6931471805599453 / 8388608) + (158 * 0.6931471805599453 + 2e-4)
