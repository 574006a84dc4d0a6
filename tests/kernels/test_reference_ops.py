"""The reference's token-wise operations compared with their formulas in float64."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.kernels import reference

SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 2**32)
DTYPES = st.sampled_from((torch.float32, torch.bfloat16))


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, formula: Tensor) -> None:
    """Check equality up to the rounding of the result's dtype."""
    tolerance = 2e-5 if actual.dtype == torch.float32 else 0.01
    torch.testing.assert_close(actual.double(), formula, atol=tolerance, rtol=tolerance)


@given(SIZES, SIZES, SEEDS, DTYPES)
@settings(max_examples=30)
def test_rms_norm(tokens: int, width: int, seed: int, dtype: torch.dtype) -> None:
    x, weight = normal(seed, tokens, width, dtype=dtype), normal(seed + 1, width)
    mean = x.double().square().mean(-1, keepdim=True)
    formula = x.double() / (mean + 1e-3).sqrt() * weight.double()
    actual = reference.rms_norm(x, weight, 1e-3)
    assert actual.dtype == dtype
    close(actual, formula)


def test_rms_norm_of_heads_and_large_numbers() -> None:
    x = torch.full((2, 3, 8), 3e4, dtype=torch.bfloat16)  # its square does not overflow float32
    assert torch.equal(reference.rms_norm(x, torch.ones(8), 1e-6), torch.ones_like(x))


@given(SIZES, SIZES, SIZES, st.booleans(), SEEDS)
@settings(max_examples=30)
def test_linear(tokens: int, inputs: int, outputs: int, has_bias: bool, seed: int) -> None:
    x, weight = normal(seed, tokens, inputs), normal(seed + 1, outputs, inputs)
    bias = normal(seed + 2, outputs) if has_bias else None
    formula = torch.einsum("ti,oi->to", x.double(), weight.double())
    actual = reference.linear(x, weight, bias)
    assert actual.is_contiguous()
    close(actual, formula + (0 if bias is None else bias.double()))


def test_linear_of_few_tokens(subtests: pytest.Subtests) -> None:
    for tokens, has_bias in product(range(1, 7), (False, True)):
        with subtests.test(tokens=tokens, has_bias=has_bias):
            for outputs, inputs in ((96, 96), (97, 32), (32, 97)):
                x, weight = normal(1, tokens, inputs), normal(2, outputs, inputs)
                bias = normal(3, outputs) if has_bias else None
                kept = None if bias is None else bias.clone()
                actual = reference.linear(x, weight, bias)
                assert actual.is_contiguous()
                close(
                    actual, x.double() @ weight.double().T + (0 if bias is None else bias.double())
                )
                assert bias is None or torch.equal(bias, kept)


@given(
    SIZES,
    SIZES,
    st.sampled_from(("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")),
    SEEDS,
    DTYPES,
)
@settings(max_examples=30)
def test_gated(tokens: int, width: int, name: str, seed: int, dtype: torch.dtype) -> None:
    fused = normal(seed, tokens, 2 * width, dtype=dtype) * 4
    before = fused.clone()
    gate, up = fused.chunk(2, dim=1)
    x = gate.double()
    cubic = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    formulas = {
        "silu": x / (1 + torch.exp(-x)),
        "gelu": x * (1 + torch.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": x * (1 + torch.tanh(cubic)) / 2,
        "relu2": x.clamp(min=0) ** 2,
    }
    if name == "swiglu_oai":
        x, y = x.clamp(max=7), up.double().clamp(-7, 7)
        formula = x / (1 + torch.exp(-1.702 * x)) * (y + 1)
    else:
        formula = formulas[name] * up.double()
    close(reference.gated(gate, up, name), formula)  # type: ignore[arg-type]
    assert torch.equal(fused, before), "an input was written"


@given(SIZES, SIZES, SEEDS, DTYPES)
@settings(max_examples=20)
def test_xielu(tokens: int, width: int, seed: int, dtype: torch.dtype) -> None:
    x = normal(seed, tokens, width, dtype=dtype) * 4
    y = x.double()
    below = 0.9 * (torch.exp(y.clamp(max=-1e-6)) - 1 - y)
    formula = torch.where(y > 0, 0.7 * y**2, below) + 0.4 * y
    close(reference.xielu(x, 0.7, 0.9, 0.4, -1e-6), formula)


@given(SIZES, st.integers(1, 4), st.integers(1, 8), st.integers(0, 5), SEEDS, DTYPES)
@settings(max_examples=40)
def test_rope_rotates_pairs_by_their_angle(
    tokens: int, heads: int, half: int, rest: int, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(50, (tokens,), generator=generator)
    angles = torch.rand(50, half, generator=generator) * 6
    x = normal(seed, tokens, heads, 2 * half + rest, dtype=dtype)
    actual = reference.rope(x, positions, angles.cos(), angles.sin())
    # As complex numbers: (first + i second) * exp(i angle).
    pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    turned = pairs * torch.exp(1j * angles.double()[positions])[:, None]
    close(actual[..., : 2 * half], torch.cat((turned.real, turned.imag), dim=-1))
    assert torch.equal(actual[..., 2 * half :], x[..., 2 * half :])
