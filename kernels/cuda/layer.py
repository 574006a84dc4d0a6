"""The operations of a layer between its products and attention, in Triton: norms, activations, and
`prepare_heads` (norms of heads, rope, storing new keys and values in the KV cache).

One program computes one token or a part of it. Values are float32 and rounded once; the sum with
the residual stream is first rounded to the stream's dtype.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.linear import SplitSums, added, operands


@triton.jit
def _normed(value, weight, bias, eps, column, size: tl.constexpr, IS_LAYER: tl.constexpr):
    """Return the RMS norm or layer norm of one row, float32 [block]; inputs from `size` on must be
    0."""
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
    first = tl.program_id(1) * size  # of a head
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + token * x_stride + first + column, mask=inside, other=0.0).to(tl.float32)
    normed = _normed(value, weight + first, bias, eps, column, size, IS_LAYER)
    place = out + token * out_stride + first + column
    tl.store(place, normed.to(out.dtype.element_ty), mask=inside)


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
    heads: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return the RMS norm (arXiv:1910.07467) of each row, or with `is_layer` the layer norm
    (arXiv:1607.06450); of each of `heads` equal parts of a row if there are several.

    x [T, N] with rows of any stride; weight and bias float32 [N], no bias with several heads; `out`
    is like x and may be x.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_tokens, size = len(x), x.shape[1] // heads
    if num_tokens:
        _norm_kernel[(num_tokens, heads)](
            x, out, weight, bias, eps, x.stride(0), out.stride(0),
            size, *_shape(size, is_layer), num_warps=_warps(size), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def add(
    stream: Tensor, x: Tensor | SplitSums, held: Tensor | None = None, factor: float = 1.0
) -> None:
    """Add held + x * factor to the residual stream `stream` in place, all [T, N]; products and sums
    are rounded to its dtype."""
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
    """Add held + x * factor to the residual stream like `add`, then return the norm of the stream,
    [T, N]."""
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
    """Return the number of warps for rows of `size` values. It depends on the size only, because it
    affects the row's sum."""
    return 1 if size <= 256 else 4 if size <= 1024 else 8 if size <= 2048 else 16


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
    if KIND == "relu2":
        return x * tl.where(x < 0.0, 0.0, x)  # NaN for NaN
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


@triton.jit
def _xielu_kernel(x, out, size, a, b, beta, eps, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + token * size + column, mask=inside, other=0.0).to(tl.float32)
    below = b * (tl.exp(tl.minimum(value, eps)) - 1.0 - value)
    result = tl.where(value > 0.0, a * value * value, below) + beta * value
    tl.store(out + token * size + column, result.to(out.dtype.element_ty), mask=inside)


def gated(
    x: Tensor | SplitSums,
    activation: Literal["silu", "gelu_tanh", "gelu", "relu2", "swiglu_oai"],
) -> Tensor:
    """Return the gated activation of x [T, 2 * N]: activation(first half) * second half, [T, N].
    swiglu_oai: gate * sigmoid(1.702 * gate) * (up + 1), with gate clamped to at most 7, and up to
    [-7, 7]."""
    values, bias, splits = operands(x)
    num_tokens, size = values.shape[-2], values.shape[-1] // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=values.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, BLOCK))
        _gated_kernel[grid](
            values, bias, splits, num_tokens, out, size, activation, BLOCK, enable_fp_fusion=False
        )
    return out


def activated(x: Tensor, activation: Literal["silu", "gelu_tanh", "gelu", "relu2"]) -> Tensor:
    """Return the activation function of x [T, N], elementwise."""
    out = torch.empty_like(x)
    num_tokens, size = x.shape
    if num_tokens:
        _activated_kernel[(num_tokens, triton.cdiv(size, BLOCK))](x, out, size, activation, BLOCK)
    return out


def xielu(x: Tensor, a: float, b: float, beta: float, eps: float) -> Tensor:
    """Return the activation xIELU (arXiv:2411.13010) of x [T, N], elementwise: a x^2 + beta x above
    0, else b (e^min(x, eps) - 1 - x) + beta x."""
    out = torch.empty_like(x)
    num_tokens, size = x.shape
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, BLOCK))
        _xielu_kernel[grid](x, out, size, a, b, beta, eps, BLOCK, enable_fp_fusion=False)
    return out


MAX_HEADS, WARPS = 8, 4  # per program; each warp loads rows of heads


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Where the heads are within a row of x: `q` query heads, which stay in x, then `kv` key heads
    and `values` value heads (kv or 0), which go to the KV cache."""

    begin: int  # column of the first head
    q: int
    kv: int
    values: int
    dim: int


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each query head and each key head, with weights float32 [dim]."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """The tables of half-split rope (arXiv:2104.09864): cos and sin float32 [positions, rotary_dim
    / 2]."""

    cos: Tensor
    sin: Tensor


@triton.jit
def _to_cache_dtype(value, dtype: tl.constexpr):
    """Cast keys or values to the cache's dtype; float16 clamps finite numbers to its range."""
    if dtype == tl.float16:
        is_finite = tl.abs(value) < float("inf")  # false for NaN, too
        value = tl.where(is_finite, tl.minimum(tl.maximum(value, -65504.0), 65504.0), value)
    return value.to(dtype)


@triton.jit
def _heads_kernel(
    x, x_stride, q_weight, k_weight, eps, positions, cos, sin, kv, slots, block_stride,
    BEGIN: tl.constexpr, Q: tl.constexpr, KV: tl.constexpr, VALUES: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Normalize, rotate and store heads for `prepare_heads`. A program processes HEADS heads of q,
    k or v of one token."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (Q + HEADS - 1) // HEADS
    K_PARTS: tl.constexpr = (KV + HEADS - 1) // HEADS
    is_q, is_k = part < Q_PARTS, part < Q_PARTS + K_PARTS
    if is_q:
        head, end = part * HEADS, Q
    elif is_k:
        head, end = Q + (part - Q_PARTS) * HEADS, Q + KV
    else:
        head, end = Q + KV + (part - Q_PARTS - K_PARTS) * HEADS, Q + KV + VALUES
    heads = head + tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, HALF_PADDED)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_PADDED)[None, :]
    in_half, in_rest = (heads < end) & (half < HALF), (heads < end) & (rest < DIM)
    source = x + token * x_stride + BEGIN + heads * DIM
    first = tl.load(source + half, mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + half, mask=in_half, other=0.0).to(tl.float32)
    others = tl.load(source + rest, mask=in_rest, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    if q_weight is not None:
        if is_k:
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            squares += tl.sum(others * others, 1)
            factor = (1.0 / tl.sqrt_rn(squares / DIM + eps))[:, None]
            weight = q_weight if is_q else k_weight
            first_weight = tl.load(weight + half, mask=half < HALF, other=0.0)
            second_weight = tl.load(weight + HALF + half, mask=half < HALF, other=0.0)
            first = (first * factor * first_weight).to(dtype).to(tl.float32)
            second = (second * factor * second_weight).to(dtype).to(tl.float32)
            others = others * factor * tl.load(weight + rest, mask=rest < DIM, other=0.0)
    if cos is not None:
        if is_k:
            index = tl.load(positions + token).to(tl.int64) * HALF + half
            c = tl.load(cos + index, mask=half < HALF, other=0.0)
            s = tl.load(sin + index, mask=half < HALF, other=0.0)
            rotated = first * c - second * s
            second = second * c + first * s
            first = rotated
    first, second, others = first.to(dtype), second.to(dtype), others.to(dtype)
    if is_q:
        tl.store(source + half, first, mask=in_half)
        tl.store(source + HALF + half, second, mask=in_half)
        tl.store(source + rest, others, mask=in_rest)
    elif kv is not None:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            target = kv + slot // BLOCK_SIZE * block_stride  # all key heads, then all value heads
            target += ((heads - Q).to(tl.int64) * BLOCK_SIZE + slot % BLOCK_SIZE) * DIM
            cache_dtype: tl.constexpr = kv.dtype.element_ty
            tl.store(
                target + half, _to_cache_dtype(first.to(tl.float32), cache_dtype), mask=in_half
            )
            tl.store(
                target + HALF + half,
                _to_cache_dtype(second.to(tl.float32), cache_dtype),
                mask=in_half,
            )
            tl.store(
                target + rest, _to_cache_dtype(others.to(tl.float32), cache_dtype), mask=in_rest
            )


def prepare_heads(
    x: Tensor,
    heads: HeadRange,
    norms: HeadNorms | None,
    rotation: Rotation | None,
    positions: Tensor,
    kv: Tensor | None,
    slots: Tensor,
) -> None:
    """Apply norm and rope to queries, in place, and to keys; write keys and values to the cache.

    x [T, columns] with rows of any stride; positions [T]; kv [blocks, planes, K, block_size, D] of
    any float dtype. Token t is written at slots[t] = block * block_size + offset; a negative slot
    is skipped. Without `kv` nothing is stored: pass keys as further queries, so that they change in
    place. Norms are rounded to x's dtype.
    """
    half = rotation.cos.shape[1] if rotation else 0
    rest = heads.dim - 2 * half
    heads_per_program = min(MAX_HEADS, triton.next_power_of_2(max(heads.q, heads.kv)))
    parts = sum(
        triton.cdiv(count, heads_per_program) for count in (heads.q, heads.kv, heads.values)
    )
    if not len(x) or not parts:
        return
    _heads_kernel[(len(x), parts)](
        x, x.stride(0),
        norms.q if norms else None, norms.k if norms else None, norms.eps if norms else 0.0,
        positions, rotation.cos if rotation else None, rotation.sin if rotation else None,
        kv, slots, kv.stride(0) if kv is not None else 0,
        heads.begin, heads.q, heads.kv, heads.values, heads.dim, half,
        triton.next_power_of_2(max(half, 1)), triton.next_power_of_2(max(rest, 1)),
        kv.shape[3] if kv is not None else 1, heads_per_program,
        num_warps=WARPS,
    )  # fmt: skip
