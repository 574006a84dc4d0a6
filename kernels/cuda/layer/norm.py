"""Norms in Triton, alone or after an addition to the residual stream; one program per token.

The sum is rounded to the stream's dtype; statistics and scaling are float32, rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.linear import SplitSums, added, operands


@triton.jit
def _normed(value, weight, bias, eps, column, size: tl.constexpr, IS_LAYER: tl.constexpr):
    """Return the norm of a row, float32 [block]; inputs from `size` on must be 0."""
    inside = column < size
    if IS_LAYER:
        value = tl.where(inside, value - tl.sum(value, 0) / size, 0.0)
    normed = value * (1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / size + eps))
    normed = normed * tl.load(weight + column, mask=inside, other=0.0)
    if bias is not None:
        normed += tl.load(bias + column, mask=inside, other=0.0)
    return normed


@triton.jit
def _norm_kernel(
    x, out, weight, bias, eps, x_stride, out_stride,
    size: tl.constexpr, BLOCK: tl.constexpr, IS_LAYER: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    normed = _normed(value, weight, bias, eps, column, size, IS_LAYER)
    tl.store(out + token * out_stride + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _add_norm_kernel(
    stream, x, x_bias, SPLITS: tl.constexpr, tokens, held, out, weight, bias, eps, factor,
    size: tl.constexpr, BLOCK: tl.constexpr, IS_LAYER: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    index = token * size + column
    dtype: tl.constexpr = stream.dtype.element_ty
    if SPLITS:
        new = added(x, x_bias, SPLITS, tokens, size, token, column, inside).to(dtype)
    else:
        new = tl.load(x + index, mask=inside, other=0.0)
    if HAS_FACTOR:
        new = (new.to(tl.float32) * factor).to(dtype)
    if held is not None:
        held_value = tl.load(held + index, mask=inside, other=0.0)
        new = (held_value.to(tl.float32) + new.to(tl.float32)).to(dtype)
    total = tl.load(stream + index, mask=inside, other=0.0).to(tl.float32) + new.to(tl.float32)
    total = total.to(dtype)
    tl.store(stream + index, total, mask=inside)
    if HAS_NORM:
        normed = _normed(total.to(tl.float32), weight, bias, eps, column, size, IS_LAYER)
        tl.store(out + index, normed.to(dtype), mask=inside)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    is_layer: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return the RMS norm (arXiv:1910.07467) of each row, or with `is_layer` the layer norm
    (arXiv:1607.06450).

    x [T, N] with rows of any stride; weight and bias float32 [N]; `out` is like x and may be x.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_tokens, size = x.shape
    if num_tokens:
        _norm_kernel[(num_tokens,)](
            x, out, weight, bias, eps, x.stride(0), out.stride(0),
            size, *_shape(size, is_layer), num_warps=_warps(size), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def add(
    stream: Tensor, x: Tensor | SplitSums, held: Tensor | None = None, factor: float = 1.0
) -> None:
    """Add held + x * factor to `stream`, all [T, N]; products and sums are rounded to its dtype."""
    num_tokens, size = stream.shape
    if num_tokens:
        _add_norm_kernel[(num_tokens,)](
            stream, *operands(x), num_tokens, held, None, None, None, 0.0, factor,
            size, *_shape(size, False), factor != 1, False, num_warps=_warps(size),
            enable_fp_fusion=False,
        )  # fmt: skip


def add_norm(
    stream: Tensor,
    x: Tensor | SplitSums,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    is_layer: bool = False,
    held: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Apply `add`, then return the norm of the stream, [T, N]."""
    out = torch.empty_like(stream)
    num_tokens, size = stream.shape
    if num_tokens:
        _add_norm_kernel[(num_tokens,)](
            stream, *operands(x), num_tokens, held, out, weight, bias, eps, factor,
            size, *_shape(size, is_layer), factor != 1, True, num_warps=_warps(size),
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _shape(size: int, is_layer: bool) -> tuple[int, bool]:
    return triton.next_power_of_2(size), is_layer


def _warps(size: int) -> int:
    """Choose warps by row size only, because their number affects the row's sum."""
    return 1 if size <= 256 else 4 if size <= 1024 else 8 if size <= 2048 else 16
