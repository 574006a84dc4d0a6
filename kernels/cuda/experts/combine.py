"""The weighted sum of the results of a token's experts, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.experts.grouping import Groups

BLOCK = 1024


def combine(
    results: Tensor,
    weights: Tensor,
    groups: Groups,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Sum each token's results [pairs, N], in group order, times float32 weights [T, top_k], in
    rank order; then add the shared expert's result [T, N], times the sigmoid of its float32 gate
    [T, 1] if given. Returns [T, N]. Weights, products and sums are rounded to the dtype of the
    results."""
    tokens, size = len(weights), results.shape[1]
    out = torch.empty((tokens, size), dtype=results.dtype, device=results.device)
    if tokens:
        _combine[(tokens, triton.cdiv(size, BLOCK))](
            results,
            weights,
            groups.places,
            shared,
            gate,
            out,
            size,
            TOP_K=groups.top_k,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _times(value, factor, dtype: tl.constexpr):
    """Multiply; the factor and the product are rounded to `dtype`."""
    return (value.to(tl.float32) * factor.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _combine(
    results, weights, places, shared, gate, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: tokens, blocks of columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    dtype: tl.constexpr = out.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + rank).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + rank)
        result = tl.load(results + place * size + column, mask=inside, other=0.0)
        total = (total + _times(result, weight, dtype)).to(dtype).to(tl.float32)
    if shared is not None:
        result = tl.load(shared + token * size + column, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            result = _times(result, 1.0 / (1.0 + tl.exp(-tl.load(gate + token))), dtype)
        total = total + result
    tl.store(out + token * size + column, total.to(dtype), mask=inside)
