"""Self-attention of one layer over the paged KV cache: norms over heads, rope, the cache itself.

x is [tokens, (q + 2 kv) heads * dim], the product with the matrices of q, k and v; latent attention
has no v.
"""

from torch import Tensor

from pdserve.engine.models.layers.torch_part import LayerStep, Setup, computes
from pdserve.engine.models.parts import Attention, HeadNorm, Heads, Rope, SliceNorm


def in_heads(x: Tensor, heads: Heads) -> Tensor:
    """Return x as [tokens, q + 2 kv, dim], sharing its memory."""
    return x.view(len(x), -1, heads.dim)


@computes(HeadNorm)
class TorchHeadNorm:
    """Changes q and k in place."""

    def __init__(self, part: HeadNorm, setup: Setup) -> None:
        self._part = part
        self._ops = setup.ops
        self._q = setup.vector(part.q, part.offset)
        self._k = setup.vector(part.k, part.offset)

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        heads, eps = self._part.heads, self._part.eps
        q_size, kv_size = heads.q * heads.dim, heads.kv * heads.dim
        q, k = x[:, :q_size], x[:, q_size : q_size + kv_size]
        for rows, weight in ((q, self._q), (k, self._k)):
            normed = rows.view(len(x), -1, len(weight))
            normed.copy_(self._ops.rms_norm(normed, weight, eps))
        return x


@computes(SliceNorm)
class TorchSliceNorm:
    """Changes its slice of x in place."""

    def __init__(self, part: SliceNorm, setup: Setup) -> None:
        self._weight = setup.vector(part.weight)
        self._part = part
        self._ops = setup.ops

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        columns = x[:, self._part.begin : self._part.begin + len(self._weight)]
        columns.copy_(self._ops.rms_norm(columns, self._weight, self._part.eps))
        return x


@computes(Rope)
class TorchRope:
    """Changes q and k in place."""

    def __init__(self, part: Rope, setup: Setup) -> None:
        heads = part.heads
        self._dim = heads.dim
        self._columns = slice(part.begin, part.begin + (heads.q + heads.kv) * heads.dim)
        self._ops = setup.ops
        self._table = setup.ropes[part.config]

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        qk = x[:, self._columns].view(len(x), -1, self._dim)
        table = self._table
        qk.copy_(self._ops.rope(qk, step.batch.positions, table.cos, table.sin))
        return x


@computes(Attention)
class TorchAttention:
    """Computes attention. Owns no keys or values: the cache comes with each step."""

    def __init__(self, part: Attention, setup: Setup) -> None:
        self._part = part
        self._ops = setup.ops
        self._sinks = setup.vector(part.sinks) if part.sinks else None

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """Store keys and values; return the attention result [T, q heads * dim], or no rows if the
        step only stores keys and values in this layer."""
        part, batch = self._part, step.batch
        rows, v_begin = in_heads(x, part.heads), part.heads.q + part.heads.kv
        k, v = rows[:, part.heads.q : v_begin], None if part.latent else rows[:, v_begin:]
        self._ops.write_kv(step.kv, k, v, batch.groups[step.group].slots)
        if step.kv_only:
            return x[:0]
        attended = self._ops.paged_attention(
            rows[:, : part.heads.q],
            step.kv,
            batch.groups[step.group].block_table,
            batch.starts,
            batch.kv_lens,
            batch.num_decode_rows,
            part.scale,
            part.window,
            part.soft_cap,
            self._sinks,
        )
        return attended[:, :, -part.latent :].flatten(1)  # all of them if latent is 0
