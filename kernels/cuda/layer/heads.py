"""The operations between the q, k, v product and attention, in one launch: head norms, rope, and
storing new keys and values in the KV cache."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

MAX_HEADS, WARPS = 8, 4  # per program; each warp loads rows of heads


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads within a row: `q` query heads, which stay there, then `kv` key heads and `values` value
    heads (kv or 0), which go to the cache."""

    begin: int  # column of the first head
    q: int
    kv: int
    values: int
    dim: int


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each head of q and k, with weights float32 [dim]."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """Half-split rope (arXiv:2104.09864): cos and sin float32 [positions, rotary_dim / 2]."""

    cos: Tensor
    sin: Tensor


@triton.jit
def _to_cache_dtype(value, dtype: tl.constexpr):
    """Cast to the cache's dtype; float16 clamps finite numbers to its range."""
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
    """Program (token, HEADS heads of q, k or v)."""
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
    is skipped. Without `kv`, count keys as queries. Norms are rounded to x's dtype.
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
