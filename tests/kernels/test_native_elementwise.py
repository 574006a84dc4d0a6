"""The norm and the gate of rows: their formulas in float64, and equal bits on every target.

The other row operations are tested in C++ (kernels/native/test/elementwise_test.cpp).
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.kernels import _native as native
from pdserve.kernels import reference

SIZES = st.integers(1, 70)
SEEDS = st.integers(0, 2**32)
ALL = [native.Context(threads, isa=isa) for isa in native.isas() for threads in (1, 2)]
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2", "swiglu_oai")
INFINITE = float("inf")


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def on_all(call: Callable[[native.Context], Tensor]) -> Tensor:
    """Return call(context), after checking that every target and thread count gives the same
    bits."""
    results = [call(context) for context in ALL]
    for result in results[1:]:
        assert torch.equal(result.view(torch.int32), results[0].view(torch.int32))
    return results[0]


def gated(context: native.Context, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    out = torch.empty_like(gate)
    native.gated(context, gate, up, activation, out)
    return out


def activated(name: str, x: Tensor) -> Tensor:
    """Return activation(x) for a row of numbers."""
    ones = torch.ones(1, len(x))
    return on_all(lambda context: gated(context, x[None].contiguous(), ones, name))[0]


@given(SIZES, st.integers(1, 600), SEEDS)
@settings(max_examples=30)
def test_rms_norm(rows: int, cols: int, seed: int) -> None:
    x, weight = normal(seed, rows, cols), normal(7, cols)

    def normed(context: native.Context) -> Tensor:
        out = torch.empty_like(x)
        native.rms_norm(context, x, weight, 1e-5, out)
        return out

    mean = x.double().square().mean(-1, keepdim=True)
    formula = x.double() / (mean + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(on_all(normed).double(), formula, rtol=2e-6, atol=0)


def test_gated(subtests: pytest.Subtests) -> None:
    for activation in ACTIVATIONS:
        with subtests.test(activation):
            for rows, cols in ((1, 1), (3, 16), (7, 37), (40, 1536)):
                gate, up = normal(rows, rows, cols) * 4, normal(cols, rows, cols) * 4
                actual = on_all(partial(gated, gate=gate, up=up, activation=activation))
                assert rows < 40 or ((gate > 7).any() and (up > 7).any() and (up < -7).any())
                formula = reference.gated(gate.double(), up.double(), activation)  # type: ignore[arg-type]
                torch.testing.assert_close(actual.double(), formula, rtol=5e-6, atol=1e-6)


def test_error_bounds_of_activations_at_all_magnitudes() -> None:
    x = torch.cat([torch.linspace(-s, s, 40_001) for s in (1e-30, 1e-3, 0.7, 5.0, 30.0, 86.0)])
    silu = activated("silu", x).double()
    torch.testing.assert_close(silu, F.silu(x.double()), rtol=4e-7, atol=1e-35)
    tanh = activated("gelu_tanh", x).double()
    formula = F.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(tanh, formula, rtol=1e-5, atol=3e-7)
    torch.testing.assert_close(activated("gelu", x).double(), F.gelu(x.double()), rtol=0, atol=6e-7)


def test_infinity_and_nan_propagate_as_in_the_reference(subtests: pytest.Subtests) -> None:
    for activation in ACTIVATIONS:
        with subtests.test(activation):
            x = torch.tensor([INFINITE, -INFINITE, float("nan"), 1e30, -1e30, 0.0])
            actual = activated(activation, x)
            expected = reference.gated(x, torch.ones(6), activation)  # type: ignore[arg-type]
            # Whether the result is infinite or NaN differs in torch.
            assert torch.equal(actual.isfinite(), expected.isfinite())
            assert actual[2].isnan()
            torch.testing.assert_close(actual[3:], expected[3:])


@pytest.mark.parametrize("bad", [float("nan"), INFINITE])
def test_a_nonfinite_row_does_not_affect_others(bad: float) -> None:
    x, weight = normal(1, 4, 40), normal(2, 40)
    x[2, 33] = bad
    out = torch.empty_like(x)
    native.rms_norm(ALL[0], x, weight, 1e-5, out)
    expected = reference.rms_norm(x, weight, 1e-5)
    assert torch.equal(out.isnan(), expected.isnan())
    assert out[[0, 1, 3]].isfinite().all()


def test_arguments_that_do_not_fit_are_refused() -> None:
    context, x, row = ALL[0], torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(ValueError, match="weight"):
        native.rms_norm(context, x, torch.zeros(7), 1e-5, torch.zeros(2, 8))
    with pytest.raises(ValueError, match="out"):
        native.rms_norm(context, x, row, 1e-5, torch.zeros(3, 8))
    with pytest.raises(ValueError, match="one shape"):
        native.gated(context, x, torch.zeros(1, 8), "silu", x)
    with pytest.raises(ValueError, match="activation"):
        native.gated(context, x, x, "relu", x)
    with pytest.raises(TypeError):
        native.rms_norm(context, x.double(), row, 1e-5, x)
    with pytest.raises(TypeError):
        native.rms_norm(context, x, row, 1e-5, torch.zeros(8, 2).t())
