"""Layers on torch: activations (GLU variants, arXiv:2002.05202), products, RMS norm
(arXiv:1910.07467), layer norm (arXiv:1607.06450), rotary position embedding (arXiv:2104.09864), and
attention over a paged KV cache, with one gather and one product for all decode rows.

A slot without a key of the row (past its end, before its window, in the null block 0) never affects
the row's output, even if the slot holds NaN.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# gpt-oss: the steepness of its sigmoid, and the limit of its inputs (arXiv:2508.10925).
SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT = 1.702, 7.0
FEW = range(2, 5)  # tokens


def gated(
    gate: Tensor,
    up: Tensor,
    activation: Literal["silu", "gelu_tanh", "gelu", "relu2", "swiglu_oai"],
) -> Tensor:
    """Return activation(gate) * up, elementwise; gelu_tanh is the tanh approximation of gelu,
    relu2 is max(x, 0) squared.

    swiglu_oai: gate * sigmoid(1.702 * gate) * (up + 1), gate clamped to at most 7, up to [-7, 7].
    """
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=SWIGLU_OAI_LIMIT), up.clamp(-SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT)
        return torch.sigmoid(gate * SWIGLU_OAI_ALPHA).mul_(gate).mul_(up + 1)
    return activated(gate, activation).mul_(up)


def activated(x: Tensor, activation: Literal["silu", "gelu_tanh", "gelu", "relu2"]) -> Tensor:
    """Return the activation function of x, elementwise."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square_()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def xielu(x: Tensor, a: float, b: float, beta: float, eps: float) -> Tensor:
    """Return the activation xIELU (arXiv:2411.13010) of x, elementwise: a x^2 + beta x above 0,
    else b (e^min(x, eps) - 1 - x) + beta x. The result is computed in float32 and returned in x's
    dtype."""
    y = x.float()
    curve = torch.where(y > 0, a * y.square(), b * (torch.expm1(y.clamp(max=eps)) - y))
    return curve.add_(y, alpha=beta).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [T, N] times weight [M, N] transposed, plus bias [M]: [T, M], all of one dtype."""
    if len(x) in FEW and len(weight) >= x.shape[1] and x.is_cpu and x.dtype == torch.float32:
        # The library is two to ten times faster with the float32 weight as the left operand.
        y = (weight @ x.t()).t().contiguous()
        return y if bias is None else y.add_(bias)
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm x / rms(x) * weight over the last dim, in x's dtype; x [..., N], weight
    float32 [N]."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the layer norm (x - mean) / deviation * weight + bias over the last dim, in x's dtype;
    x [..., N], weight and bias float32 [N]."""
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dims of each head; dim i pairs with dim i + R / 2.

    x [T, H, D]; positions int64 [T]; cos and sin float32 [P, R / 2], one row per position. The
    result is computed in float32 and returned in x's dtype; dims from R on are copied.
    """
    half = cos.shape[1]
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, R / 2]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty_like(x)
    out[..., :half] = first * c - second * s
    out[..., half : 2 * half] = second * c + first * s
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


TILE = 256  # query tokens; slightly the best of 64 to 512 for chunks of 512 and 2048
TILE_SCORES = 1 << 25  # over all heads, 128 MiB; with more keys, tiles have fewer tokens (min. 8)
MAX_FLOAT16 = 65504.0
FUSED_FROM = 32  # queries per head from which torch's fused attention is faster


def write_kv(kv: Tensor, k: Tensor, v: Tensor | None, slots: Tensor) -> None:
    """Store new keys and values: k, v [T, K, D] at slots int64 [T] = block * block_size + offset.

    kv is [blocks, 2, K, block_size, D], keys first, or [blocks, 1, ...] if the keys are the values
    and v is None. Numbers are cast to kv's dtype; float16 clamps finite numbers to its range. Slots
    must be distinct.
    """
    _, planes, heads, block_size, _ = kv.shape
    block, offset = slots // block_size, slots % block_size
    head = torch.arange(heads, device=kv.device)
    rows = ((block * (planes * heads))[:, None] + head) * block_size + offset[:, None]  # [T, K]
    flat = kv.view(-1, kv.shape[-1])
    for x in (k,) if v is None else (k, v):
        if kv.dtype == torch.float16:
            x = torch.where(x.isfinite(), x.clamp(-MAX_FLOAT16, MAX_FLOAT16), x)
        flat[rows] = x.to(kv.dtype)
        rows = rows + heads * block_size


def paged_attention(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    starts: tuple[int, ...],
    kv_lens: tuple[int, ...],
    num_decode_rows: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Compute attention of each row's tokens over its cached keys, including their own.

    q [T, H, D]: row r's tokens are at [starts[r], starts[r + 1]), the last one at position
    kv_lens[r] - 1; the first `num_decode_rows` rows have one token. kv is [blocks, 2, K,
    block_size, D], or [blocks, 1, ...] if the keys are the values; H is a multiple of K.
    block_table int64 [rows, max_blocks]: column c holds positions from c * block_size. A token sees
    `window` keys, including its own (0: all). `soft_cap` > 0 turns scores into soft_cap *
    tanh(score / soft_cap). `sinks` float32 [H] are scores without a key that take part in the
    softmax (arXiv:2309.17453). If not `causal`, a token also sees the keys after its own: all, or
    `window` counting its own; each row must then have all its tokens. Returns [T, H, D] in q's
    dtype.
    """
    if sinks is not None:
        sinks = sinks.view(kv.shape[2], -1, 1)  # [K, G, 1]
    parts = []
    if num_decode_rows:
        parts.append(
            _decode(
                q[:num_decode_rows],
                kv,
                block_table[:num_decode_rows],
                kv_lens[:num_decode_rows],
                scale,
                window,
                soft_cap,
                sinks,
            )
        )
    for row in range(num_decode_rows, len(kv_lens)):
        tokens = q[starts[row] : starts[row + 1]]
        blocks, kv_len = block_table[row], kv_lens[row]
        parts.append(_chunk(tokens, kv, blocks, kv_len, scale, window, soft_cap, sinks, causal))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    kv_lens: tuple[int, ...],
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute the attention of rows with one token each, q [B, H, D]. Rows with similar block
    counts are computed together."""
    block_size, max_blocks = kv.shape[3], block_table.shape[1]
    firsts = [max(n - window, 0) // block_size if window else 0 for n in kv_lens]
    spans = [-(-n // block_size) - first for n, first in zip(kv_lens, firsts, strict=True)]
    out = torch.empty_like(q)
    for rows, span in _buckets(spans):
        has_all_rows = len(rows) == len(spans)
        selected = slice(None) if has_all_rows else torch.tensor(rows, device=q.device)
        lens = torch.tensor([kv_lens[row] for row in rows], device=q.device)[:, None]
        key = torch.arange(span * block_size, device=q.device)  # [span * block_size]
        if window:
            first = torch.tensor([firsts[row] for row in rows], device=q.device)[:, None]
            key = key + first * block_size
            seen = (key < lens) & (key >= lens - window)
            # Columns past a row's last block are clamped; the mask hides the keys found there.
            columns = first + torch.arange(span, device=q.device)
            blocks = block_table[selected].gather(1, columns.clamp_(max=max_blocks - 1))
        else:
            seen = key < lens
            blocks = block_table[selected, :span]
        grouped = q[selected].reshape(len(rows), kv.shape[2], -1, q.shape[2])  # [B, K, G, D]
        out[selected] = _attend_seen(grouped, kv, blocks, seen, scale, soft_cap, sinks).flatten(
            1, 2
        )
    return out


def _attend_seen(
    q: Tensor,
    kv: Tensor,
    blocks: Tensor,
    seen: Tensor,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute the attention of rows with one token each, q [B, K, G, D], over the keys that they
    see (`seen`) in the blocks [B, n]."""
    k, v = _gather(kv, blocks, q.dtype)
    mask = seen[:, None, None]
    if q.is_cpu:
        result = _attend(q, k, v, mask, scale, soft_cap, sinks)
        if torch.isfinite(result.sum()):
            return result
    # Unseen slots have weight 0, so only infinity or NaN in them reaches the result. On other
    # devices than the CPU, checking the result costs more than clearing the slots.
    hidden = ~seen[:, None, :, None]
    k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    return _attend(q, k, v, mask, scale, soft_cap, sinks)


def _buckets(spans: list[int]) -> list[tuple[list[int], int]]:
    """Divide rows into groups to compute together, given the number of cache blocks of each row
    (`spans`). Returns the rows and the widest span of each group. Spans of a group are within a
    factor of two; all rows form one group if padding adds at most half to the cost."""
    widest = max(spans)
    if 2 * widest * len(spans) <= 3 * sum(spans):
        return [(list(range(len(spans))), widest)]
    buckets: dict[int, list[int]] = {}
    for row, span in enumerate(spans):
        buckets.setdefault(span.bit_length(), []).append(row)
    return [(rows, max(spans[row] for row in rows)) for rows in buckets.values()]


def _chunk(
    q: Tensor,
    kv: Tensor,
    block_row: Tensor,
    kv_len: int,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    causal: bool,
) -> Tensor:
    """Compute the attention of one row's tokens [t, H, D] at positions [kv_len - t, kv_len) in
    tiles, so that keys after a tile or before all its windows cost nothing."""
    block_size = kv.shape[3]
    num_tokens = q.shape[0]
    low = max(0, kv_len - num_tokens - window + 1) if window else 0
    origin = low // block_size * block_size  # position of the first key that is gathered
    blocks = block_row[None, low // block_size : -(-kv_len // block_size)]
    k, v = _gather(kv, blocks, q.dtype)  # [1, K, keys, D]
    out = torch.empty_like(q)
    size = min(TILE, max(8, TILE_SCORES // (q.shape[1] * (kv_len - origin))))
    for start in range(0, num_tokens, size):
        tile = q[start : start + size]
        begin = kv_len - num_tokens + start
        end = begin + len(tile)
        position = torch.arange(begin, end, device=q.device)[:, None]
        if not causal:
            end = min(kv_len, end - 1 + window) if window else kv_len
        low = max(0, begin - window + 1) if window else 0
        key = torch.arange(low, end, device=q.device)
        seen = key <= position if causal else (key >= low).expand(len(tile), -1)
        if window:
            seen = seen & (key > position - window)
            if not causal:
                seen = seen & (key < position + window)
        span = slice(low - origin, end - origin)
        keys, values = k[:, :, span], v[:, :, span]
        out[start : start + size] = _tile(tile, keys, values, seen, scale, soft_cap, sinks)
    return out


def _tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute the attention of one tile of tokens, q [t, H, D] over k, v [1, K, keys, D]. The query
    heads of one kv head become further query positions, so keys are never repeated in memory."""
    num_tokens, _, head_dim = q.shape
    heads = k.shape[1]
    grouped = q.reshape(num_tokens, heads, -1, head_dim).permute(1, 2, 0, 3)  # [K, G, t, D]
    group = grouped.shape[1]
    folded = grouped.reshape(1, heads, group * num_tokens, head_dim)
    if sinks is not None:
        sinks = sinks.repeat_interleave(num_tokens, 1)  # [K, G * t, 1]
    result = _attend(folded, k, v, seen.repeat(group, 1), scale, soft_cap, sinks)
    return result.reshape(heads, group, num_tokens, head_dim).permute(2, 0, 1, 3).reshape(q.shape)


def _gather(kv: Tensor, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gather the keys and values of cache blocks [B, n] in one copy: each [B, K, n * block_size,
    D]."""
    _, planes, heads, block_size, head_dim = kv.shape
    part = torch.arange(planes * heads, device=kv.device).view(planes, 1, heads, 1)
    index = (blocks * (planes * heads))[:, None] + part  # [2, B, K, n]
    flat = kv.view(-1, block_size * head_dim).index_select(0, index.flatten())
    gathered = flat.to(dtype).view(planes, len(blocks), heads, -1, head_dim)
    return gathered[0], gathered[-1]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention, softmax(q k^T * scale) v, over the last two dims. `mask` is True for
    visible keys; `sinks` [K, queries, 1] has one sink per query.

    Scores and softmax are float32. For few queries, plain products are faster than fused attention.
    """
    if not soft_cap and sinks is None and q.shape[2] >= FUSED_FROM:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.matmul(q.float() * scale, k.float().transpose(-1, -2))
    if soft_cap:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores = scores.masked_fill_(~mask, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sink_scores = sinks.expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, sink_scores), dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(q.dtype), v)
