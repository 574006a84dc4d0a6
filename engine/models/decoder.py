"""The one decoder: every architecture is a `ModelConfig` of it.

Owns the weights, which never change; keys and values belong to the KvCache of the caller.
"""

from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine.execution.batch import Batch, Ints, on
from pdserve.engine.kv.spec import LayerGroup
from pdserve.engine.models.build import block, norm_weight
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.identity import reference_numerics
from pdserve.engine.models.layers.block import Block
from pdserve.engine.models.layers.linear import Linear
from pdserve.engine.models.layers.rope import RopeTable
from pdserve.engine.weights.stored import Weight, Weights, rows
from pdserve.kernels.ops import Ops


class LayerKv(Protocol):
    """What the decoder needs of a KvCache."""

    def layer(self, n: int) -> tuple[Tensor, int]:
        """(kv [blocks, 2, K, block_size, D] of model layer n, its group's index)."""


class Decoder:
    """A decoder-only transformer on one device, computing in one dtype.

    `weights` is asked once for each name of `tensor_shapes(config)` and answers on `device`; what
    it returns expanded is held in `dtype`, what it returns as stored is expanded at each use.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        dtype: torch.dtype,
        kv_dtype: str,
        device: torch.device,
    ) -> None:
        self.config = config
        self.kv_groups: tuple[LayerGroup, ...] = config.kv_groups(kv_dtype)
        self.dtype = dtype
        self._device = device
        self.numerics = reference_numerics(device, dtype)
        self._ops = ops
        self._embedding: Weight = weights("model.embed_tokens.weight")
        ropes = dict.fromkeys(layer.rope for layer in config.layers)
        self._ropes = {rope: RopeTable(rope, config.context_len, device) for rope in ropes}
        self._blocks: list[Block] = [
            block(config, n, weights, ops, dtype, self._ropes[layer.rope])
            for n, layer in enumerate(config.layers)
        ]
        self._norm = norm_weight(config, weights("model.norm.weight"))
        head = self._embedding if config.tied_head else weights("lm_head.weight")
        self._head = Linear(ops, (head,), dtype=dtype)
        # Rounded as the other weights are, which is what models were trained with.
        self._embed_scale = torch.tensor(config.embed_scale, dtype=dtype).item()

    @torch.inference_mode()
    def forward(self, host_batch: Batch[Ints], kv: LayerKv) -> Tensor:
        """Write the KV of batch's tokens; final hidden states [len(batch.logit_tokens), hidden].

        With `batch.kv_only` the last layer stops at its keys and values and there are none.
        """
        batch = on(host_batch, self._device)
        for table in self._ropes.values():
            table.reserve(max(batch.kv_lens))
        delta = rows(self._embedding, batch.token_ids, self.dtype)
        if self._embed_scale != 1:
            delta = delta * self._embed_scale
        residual: Tensor | None = None
        last = len(self._blocks) - 1
        for n, layer in enumerate(self._blocks):
            cache, group = kv.layer(n)
            if batch.kv_only and n == last:
                layer.store_kv(delta, residual, batch, cache, group)
                return delta.new_empty((0, self.config.hidden_size))
            delta, residual = layer(delta, residual, batch, cache, group)
        assert residual is not None, "a model has layers"
        stream = (delta + residual).index_select(0, batch.logit_tokens)
        return self._ops.rms_norm(stream, self._norm, self.config.norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of what `forward` returned, or of some of it: all can be much."""
        logits = self._head(hidden).float()
        cap = self.config.logit_soft_cap
        return torch.tanh(logits / cap).mul_(cap) if cap else logits
