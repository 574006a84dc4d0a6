"""Activations in Triton compared with torch in float64."""

import pytest
import torch
from fakes import triton_interpreter as _  # noqa: F401  (before kernels run)

from pdserve.kernels import reference
from pdserve.kernels.cuda.layer import activated, gated, xielu

pytestmark = pytest.mark.kernels

SHAPES = [(1, 1), (1, 7), (2, 16), (3, 33), (5, 64), (4, 127), (1, 1024), (2, 1025), (3, 1500)]
SHAPES += [(1, 3000), (6, 96), (17, 8)]
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]


@pytest.mark.parametrize(("dtype", "most"), DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "relu2", "swiglu_oai"])
def test_activation(shape: tuple[int, int], dtype: torch.dtype, most: float, kind: str) -> None:
    tokens, size = shape
    draw = torch.Generator().manual_seed(tokens * size)
    x = (torch.randn(tokens, 2 * size, generator=draw) * 5).to(dtype)
    formula = reference.gated(x[:, :size].double(), x[:, size:].double(), kind)
    actual = gated(x, kind)
    assert (actual.dtype, actual.shape) == (dtype, shape)
    assert (actual.double() - formula).norm() <= most * formula.norm()
    if kind != "swiglu_oai":
        formula = reference.activated(x.double(), kind)
        assert (activated(x, kind).double() - formula).norm() <= most * formula.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_xielu(dtype: torch.dtype, tolerance: float) -> None:
    curve = {"a": 0.7, "b": 0.9, "beta": 0.4, "eps": -1e-6}
    for shape in SHAPES:
        draw = torch.Generator().manual_seed(sum(shape))
        x = (torch.randn(shape, generator=draw) * 5).to(dtype)
        formula = reference.xielu(x.float(), **curve)
        actual = xielu(x, **curve)
        assert (actual.dtype, actual.shape) == (dtype, shape)
        assert (actual.float() - formula).norm() <= tolerance * formula.norm()


def test_saturated_activations_are_finite() -> None:
    x = torch.tensor([[-1e4, 1e4, 1.0, 1.0]])
    for kind in ("silu", "gelu_tanh", "gelu"):
        assert torch.equal(gated(x, kind), torch.tensor([[0.0, 1e4]]))
