"""Self-attention of one layer over the paged KV cache."""

import torch
from torch import Tensor

from pdserve.engine.execution.batch import Batch
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.layers.linear import Linear
from pdserve.engine.models.layers.rope import RopeTable
from pdserve.kernels.ops import Ops


class Attention:
    """q, k, v from one product; optional norms over heads, rope, cache, output product.

    Owns no keys or values: they go to the cache that is handed to each call.
    """

    def __init__(
        self,
        ops: Ops,
        config: ModelConfig,
        window: int,
        rope: RopeTable,
        qkv: Linear,
        out: Linear,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> None:
        self._ops = ops
        self._config = config
        self._window = window
        self._rope = rope
        self._qkv = qkv
        self._out = out
        self._q_norm = q_norm
        self._k_norm = k_norm

    def __call__(self, x: Tensor, batch: Batch[Tensor], kv: Tensor, group: int) -> Tensor:
        """x [T, hidden] to [T, hidden]; kv is this layer's, `group` its index in batch.groups."""
        q = self.store(x, batch, kv, group)
        attended = self._ops.paged_attention(
            q,
            kv,
            batch.groups[group].block_table,
            batch.starts,
            batch.kv_lens,
            batch.num_decode_rows,
            self._config.attn_scale,
            self._window,
            self._config.attn_soft_cap,
        )
        return self._out(attended.flatten(1))

    def store(self, x: Tensor, batch: Batch[Tensor], kv: Tensor, group: int) -> Tensor:
        """Write the keys and values of x to the cache; returns the queries [T, H, D]."""
        heads, kv_heads = self._config.num_heads, self._config.num_kv_heads
        qkv = self._qkv(x).view(len(x), -1, self._config.head_dim)  # [T, H + 2K, D]
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self._q_norm is not None and self._k_norm is not None:
            eps = self._config.norm_eps
            q = self._ops.rms_norm(qk[:, :heads], self._q_norm, eps)
            k = self._ops.rms_norm(qk[:, heads:], self._k_norm, eps)
            qk = torch.cat((q, k), dim=1)
        qk = self._ops.rope(qk, batch.positions, self._rope.cos, self._rope.sin)
        self._ops.write_kv(kv, qk[:, heads:], v, batch.groups[group].slots)
        return qk[:, :heads]
