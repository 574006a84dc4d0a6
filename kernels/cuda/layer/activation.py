"""Activations in Triton, plain and gated (arXiv:2002.05202): computed in float32, rounded once."""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.linear import SplitSums, added, operands

BLOCK = 1024
# gpt-oss: the steepness of its sigmoid, and the limit of its inputs (arXiv:2508.10925).
SWIGLU_OAI_ALPHA: tl.constexpr = tl.constexpr(1.702)
SWIGLU_OAI_LIMIT: tl.constexpr = tl.constexpr(7.0)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    if KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))  # (1 + tanh y) / 2 = 1 / (1 + e^-2y)
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit(do_not_specialize=["tokens"])
def _gated_kernel(
    x, bias, SPLITS: tl.constexpr, tokens, out, size, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    dtype: tl.constexpr = out.dtype.element_ty
    if SPLITS:
        rows = 2 * size
        gate = added(x, bias, SPLITS, tokens, rows, token, column, inside).to(dtype)
        up = added(x, bias, SPLITS, tokens, rows, token, size + column, inside).to(dtype)
    else:
        source = x + token * 2 * size + column
        gate = tl.load(source, mask=inside, other=0.0)
        up = tl.load(source + size, mask=inside, other=0.0)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if KIND == "swiglu_oai":
        gate = tl.minimum(gate, SWIGLU_OAI_LIMIT)
        up = tl.minimum(tl.maximum(up, -SWIGLU_OAI_LIMIT), SWIGLU_OAI_LIMIT)
        result = gate / (1.0 + tl.exp(-gate * SWIGLU_OAI_ALPHA)) * (up + 1.0)
    else:
        result = _activated(gate, KIND) * up
    tl.store(out + token * size + column, result.to(dtype), mask=inside)


@triton.jit
def _activated_kernel(x, out, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + token * size + column, mask=inside, other=0.0).to(tl.float32)
    result = _activated(value, KIND)
    tl.store(out + token * size + column, result.to(out.dtype.element_ty), mask=inside)


def gated(
    x: Tensor | SplitSums, activation: Literal["silu", "gelu_tanh", "gelu", "swiglu_oai"]
) -> Tensor:
    """Return activation(first half) * second half of x [T, 2 * N]: [T, N]. swiglu_oai: gate *
    sigmoid(1.702 * gate) * (up + 1), with gate clamped to at most 7, and up to [-7, 7]."""
    values, bias, splits = operands(x)
    num_tokens, size = values.shape[-2], values.shape[-1] // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=values.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, BLOCK))
        _gated_kernel[grid](
            values, bias, splits, num_tokens, out, size, activation, BLOCK, enable_fp_fusion=False
        )
    return out


def activated(x: Tensor, activation: Literal["silu", "gelu_tanh", "gelu"]) -> Tensor:
    """Return activation(x), elementwise; x [T, N]."""
    out = torch.empty_like(x)
    num_tokens, size = x.shape
    if num_tokens:
        _activated_kernel[(num_tokens, triton.cdiv(size, BLOCK))](x, out, size, activation, BLOCK)
    return out
