"""Norms in Triton compared with float64, and a row's independence of the other rows."""

import pytest
import torch
from builders.linear_cases import BF16, made
from fakes import triton_interpreter  # noqa: F401  (before kernels run)
from torch import Tensor

from pdserve.kernels.cuda.layer import add, add_norm, gated, norm
from pdserve.kernels.cuda.linear import SplitSums, linear, split_linear

pytestmark = pytest.mark.kernels

SHAPES = [(1, 1), (1, 16), (2, 17), (3, 64), (5, 100), (7, 128), (2, 257), (4, 640), (1, 1000)]
SHAPES += [(3, 1024), (2, 2880), (1, 4100)]
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(actual: Tensor, formula: Tensor) -> float:
    return float((actual.double() - formula).norm() / formula.norm().clamp_min(1e-30))


def formula(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_layer: bool) -> Tensor:
    x = x.double()
    if is_layer:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize(("dtype", "most"), DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["rms", "layer", "layer with bias"])
def test_norm(shape: tuple[int, int], dtype: torch.dtype, most: float, kind: str) -> None:
    x, weight = drawn(1, *shape, dtype=dtype) * 3 + 1, drawn(2, shape[1])
    bias = drawn(3, shape[1]) if kind.endswith("bias") else None
    is_layer = kind != "rms"
    actual = norm(x, weight, bias, 1e-3, is_layer=is_layer)
    assert actual.dtype == dtype
    assert error(actual, formula(x, weight, bias, 1e-3, is_layer)) <= most


@pytest.mark.parametrize(("dtype", "most"), DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (3, 20), (5, 64)])
def test_norm_of_heads(heads: int, dim: int, dtype: torch.dtype, most: float) -> None:
    x, weight = drawn(1, 4, heads * dim + 7, dtype=dtype) * 3 + 1, drawn(2, heads, dim)
    columns = x[:, : heads * dim]
    expected = formula(columns.reshape(4, heads, dim), weight, None, 1e-3, True).flatten(1)
    rest = x[:, heads * dim :].clone()
    norm(columns, weight.flatten(), None, 1e-3, is_layer=True, heads=heads, out=columns)
    assert error(columns, expected) <= most
    assert torch.equal(x[:, heads * dim :], rest)


@pytest.mark.parametrize(("dtype", "most"), DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_held", [False, True])
def test_add_norm(shape: tuple[int, int], dtype: torch.dtype, most: float, has_held: bool) -> None:
    stream, x, held = (drawn(n, *shape, dtype=dtype) for n in range(3))
    weight = drawn(4, shape[1])
    before, scaled = stream.clone(), (x.float() * 0.22).to(dtype)
    actual = add_norm(stream, x, weight, None, 1e-5, held=held if has_held else None, factor=0.22)
    assert torch.equal(stream, before + (held + scaled if has_held else scaled))
    assert error(actual, formula(stream, weight, None, 1e-5, False)) <= most
    alone = before.clone()
    add(alone, x, held if has_held else None, 0.22)
    assert torch.equal(alone, stream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_splits_are_added_in_the_same_order_as_by_the_product(
    dtype: torch.dtype, has_bias: bool
) -> None:
    matrix, _ = made(("BF16", 1100, 0, BF16, False), 70, dtype)
    x, stream = drawn(1, 3, 1100, dtype=dtype), drawn(2, 3, 70, dtype=dtype)
    weight, bias = drawn(3, 70), drawn(4, 70) if has_bias else None
    sums = split_linear(x, matrix, bias)
    assert isinstance(sums, SplitSums)
    assert len(sums.partials) == 3
    for held in (None, drawn(5, 3, 70, dtype=dtype)):
        once, other = stream.clone(), stream.clone()
        actual = add_norm(once, sums, weight, None, 1e-5, held=held, factor=0.5)
        product = linear(x, matrix, bias)
        assert torch.equal(
            actual, add_norm(other, product, weight, None, 1e-5, held=held, factor=0.5)
        )
        assert torch.equal(once, other)
    assert torch.equal(gated(sums, "silu"), gated(product, "silu"))


def test_a_row_does_not_depend_on_other_rows() -> None:
    stream, x = drawn(1, 9, 300, dtype=torch.bfloat16), drawn(2, 9, 300, dtype=torch.bfloat16)
    weight = drawn(3, 300)
    alone = [
        add_norm(stream[n : n + 1].clone(), x[n : n + 1], weight, None, 1e-6) for n in range(9)
    ]
    assert torch.equal(torch.cat(alone), add_norm(stream, x, weight, None, 1e-6))


def test_rows_of_a_wider_tensor_are_normed_in_place() -> None:
    wide, weight = drawn(1, 4, 50), drawn(2, 20)
    before = wide.clone()
    place = wide[:, 7:27]
    norm(place, weight, None, 1e-6, out=place)
    assert error(place, formula(before[:, 7:27], weight, None, 1e-6, False)) <= 1e-5
    assert torch.equal(wide[:, :7], before[:, :7])
    assert torch.equal(wide[:, 27:], before[:, 27:])


def test_large_numbers_do_not_overflow() -> None:
    x = torch.full((2, 8), 3e4, dtype=torch.bfloat16)
    assert torch.equal(norm(x, torch.ones(8), None, 1e-6), torch.ones_like(x))


def test_an_empty_batch_launches_no_kernel() -> None:
    empty = torch.empty(0, 8)
    assert norm(empty, torch.ones(8), None, 1e-6).shape == (0, 8)
    assert add_norm(empty, empty, torch.ones(8), None, 1e-6).shape == (0, 8)
    add(empty, empty)
