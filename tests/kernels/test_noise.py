"""Noise equals a pure-Python implementation of its formula and is Gumbel distributed."""

import math
import struct

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kernels.reference.sampling import gumbel_argmax, gumbel_at, gumbel_noise

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def log(x: float) -> float:
    (bits,) = struct.unpack("<q", struct.pack("<d", x))
    exponent = (bits >> 52) - 1023
    (m,) = struct.unpack("<d", struct.pack("<q", (bits & ((1 << 52) - 1)) | (1023 << 52)))
    if m > 1.4142135623730951:
        m, exponent = m * 0.5, exponent + 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = 1.0 / 21
    for i in range(9, -1, -1):
        p = p * z
        p = p + 1.0 / (2 * i + 1)
    return exponent * 0.6931471805599453 + (2.0 * s) * p


def noise(seed: int, choice: int, position: int, token: int) -> float:
    key = mix((seed + GOLDEN) & MASK)
    key = mix(((key ^ choice) + GOLDEN) & MASK)
    key = mix(((key ^ position) + GOLDEN) & MASK)
    bits = mix((key + (token + 1) * GOLDEN) & MASK) >> 32
    g = -log(-log((bits + 0.5) * 2.0**-32))
    (as_float32,) = struct.unpack("<f", struct.pack("<f", g))
    return float(as_float32)


def signed(seed: int) -> int:
    return seed - (1 << 64) if seed >> 63 else seed


@settings(max_examples=50)
@given(st.integers(0, MASK), st.integers(0, 127), st.integers(0, 1 << 20), st.integers(1, 300))
def test_equals_the_formula_bit_for_bit(seed: int, choice: int, position: int, vocab: int) -> None:
    got = gumbel_noise(
        torch.tensor([signed(seed)]), torch.tensor([choice]), torch.tensor([position]), vocab
    )
    assert got.dtype == torch.float32
    assert got[0].tolist() == [noise(seed, choice, position, t) for t in range(vocab)]


def test_the_logarithm_is_accurate() -> None:
    for x in (2.0**-33, 1e-10, 0.1, 0.5, 0.7071, 0.70711, 1 - 2.0**-33, 1.0, 1.5, 22.8):
        assert math.isclose(log(x), math.log(x), rel_tol=1e-15, abs_tol=1e-18), x


def test_distribution_is_gumbel() -> None:
    rows, vocab = 16, 4096
    draws = gumbel_noise(
        torch.arange(rows), torch.arange(rows) % 3, torch.arange(rows) * 7, vocab
    ).double()
    ordered = draws.flatten().sort().values
    theory = torch.exp(-torch.exp(-ordered))
    n = len(ordered)
    steps = torch.arange(n, dtype=torch.float64)
    distance = torch.maximum(theory - steps / n, (steps + 1) / n - theory).max()
    assert float(distance) < 1.63 / math.sqrt(n)  # Kolmogorov-Smirnov, 1 %
    # Streams that differ in one coordinate are not correlated.
    correlation = torch.corrcoef(draws)
    assert float((correlation - torch.eye(rows)).abs().max()) < 5 / math.sqrt(vocab)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 400), st.booleans())
def test_argmax_equals_the_full_sum(seed: int, vocab: int, coarse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, vocab, generator=generator) * 4
    if coarse:
        scores = scores.round()
    scores[:, 1::3] = float("-inf")
    where = torch.tensor([seed, seed + 1, 5]), torch.tensor([0, 1, 2]), torch.tensor([9, 8, 7])
    expected = (scores + gumbel_noise(*where, vocab)).argmax(dim=-1)
    assert gumbel_argmax(scores, *where).tolist() == expected.tolist()


def test_noise_of_selected_ids_equals_that_of_all() -> None:
    where = torch.tensor([3]), torch.tensor([0]), torch.tensor([4])
    ids = torch.tensor([[7, 0, 300]])
    assert torch.equal(gumbel_at(*where, ids), gumbel_noise(*where, 301)[:, [7, 0, 300]])
