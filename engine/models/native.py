"""The decoder on the native CPU kernels: any ModelConfig, a whole step in two calls.

Owns the packed weights. Keys lie [head_dim, block_size] within a block of its KV cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.execution.batch import Batch, Ints
from pdserve.engine.kv.spec import LayerGroup
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.rope import RopeTable
from pdserve.engine.weights.format import RawTensor
from pdserve.engine.weights.unpack import as_plain, unpack
from pdserve.kernels import _native
from pdserve.kernels.cpu import FORMATS, CpuKernels

Floats = NDArray[np.float32]
Weights = Callable[[str], RawTensor]


class ArrayKv(Protocol):
    """What the decoder needs of a KvCache."""

    def layer(self, n: int) -> tuple[NDArray[Any], int]:
        """(blocks of model layer n, its group's index)."""


class NativeDecoder:
    """What `Decoder` is, on packed weights; `weights` answers with tensors as they are stored."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: CpuKernels, kv_dtype: str
    ) -> None:
        self.config = config
        self.kv_groups: tuple[LayerGroup, ...] = tuple(
            replace(group, keys_by_dim=True) for group in config.kv_groups(kv_dtype)
        )
        self.numerics = kernels.numerics
        self._kernels = kernels
        self._kv_dtype = kv_dtype
        self._kv: ArrayKv | None = None
        self._group_of = {n: g for g, group in enumerate(self.kv_groups) for n in group.layers}
        self._stack = _native.Stack(
            kernels.context,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            ffn=config.ffn_size,
            eps=config.norm_eps,
            attn_scale=config.attn_scale,
            attn_soft_cap=config.attn_soft_cap,
            logit_soft_cap=config.logit_soft_cap,
            embed_scale=config.embed_scale,
            activation=config.activation,
        )
        ropes = dict.fromkeys(layer.rope for layer in config.layers)
        self._ropes = {rope: RopeTable(rope, config.context_len) for rope in ropes}
        self._rope_len = 0
        self._reserve_positions(1)
        embedding = self._pack(weights("model.embed_tokens.weight"))
        self._stack.set_embedding(embedding)
        for n in range(config.num_layers):
            self._add_layer(n, weights)
        norm = norm_weight(config, weights("model.norm.weight"))
        head = embedding if config.tied_head else self._pack(weights("lm_head.weight"))
        self._stack.set_head(norm, head)
        self._logits = np.empty((0, config.vocab_size), np.float32)

    def forward(self, batch: Batch[Ints], kv: ArrayKv) -> Floats:
        """As Decoder.forward; float32. Raises ValueError for an index out of range."""
        if kv is not self._kv:
            self._attach(kv)
        self._reserve_positions(max(batch.kv_lens))
        return self._stack.forward(
            batch.token_ids,
            batch.positions,
            batch.starts,
            batch.kv_lens,
            [group.block_table for group in batch.groups],
            [group.slots for group in batch.groups],
            batch.logit_tokens,
            batch.kv_only,
        )

    @property
    def shares(self) -> int:
        """In how many shares the threads took the rows of the last step through all layers; 0:
        they shared every operation."""
        return self._stack.shares

    def logits(self, hidden: Floats) -> Floats:
        """As Decoder.logits; the memory is used again by the next call."""
        if len(hidden) > len(self._logits):
            self._logits = np.empty((len(hidden), self.config.vocab_size), np.float32)
        out = self._logits[: len(hidden)]
        self._stack.logits(hidden, out)
        return out

    def _attach(self, kv: ArrayKv) -> None:
        pools = [kv.layer(n)[0] for n in range(self.config.num_layers)]
        blocks = [pool.reshape(len(pool), -1).view(np.uint8) for pool in pools]
        block_size = blocks[0].shape[1] // self.kv_groups[0].block_bytes(1)
        self._stack.set_kv(blocks, self._kv_dtype, block_size)
        self._kv = kv

    def _reserve_positions(self, num_positions: int) -> None:
        if num_positions <= self._rope_len:
            return
        for index, table in enumerate(self._ropes.values()):
            table.reserve(num_positions)
            self._stack.set_rope(index, table.cos, table.sin)
        self._rope_len = min(len(table.cos) for table in self._ropes.values())

    def _add_layer(self, n: int, weights: Weights) -> None:
        config, layer, prefix = self.config, self.config.layers[n], f"model.layers.{n}."
        qkv = [f"self_attn.{part}_proj" for part in "qkv"]
        linears = {
            "qkv": (qkv, config.qkv_bias),
            "out": (["self_attn.o_proj"], config.o_bias),
            "gate_up": (["mlp.gate_proj", "mlp.up_proj"], config.ffn_bias),
            "down": (["mlp.down_proj"], config.ffn_bias),
        }
        matrices = {
            place: [self._pack(weights(f"{prefix}{name}.weight")) for name in names]
            for place, (names, _) in linears.items()
        }
        biases = {
            place: _joined([weights(f"{prefix}{name}.bias") for name in names])
            for place, (names, has_bias) in linears.items()
            if has_bias
        }
        places = config.norms
        norms = {
            "attn_in": places.attn_in,
            "attn_out": places.attn_out,
            "ffn_in": places.ffn_in,
            "ffn_out": places.ffn_out,
            "q_norm": "self_attn.q_norm" if config.qk_norm else None,
            "k_norm": "self_attn.k_norm" if config.qk_norm else None,
        }
        self._stack.add_layer(
            group=self._group_of[n],
            window=layer.window,
            rope=list(self._ropes).index(layer.rope),
            norms={
                place: norm_weight(config, weights(f"{prefix}{name}.weight"))
                for place, name in norms.items()
                if name
            },
            weights=matrices,
            biases=biases,
        )

    def _pack(self, weight: RawTensor) -> "_native.Matrix":
        """Formats that no kernel knows are expanded to float32."""
        stored = weight if weight.format in FORMATS else as_plain(weight, "F32")
        (data,) = stored.parts.values()
        return self._kernels.pack(data, stored.format, *stored.shape)


def norm_weight(config: ModelConfig, weight: RawTensor) -> Floats:
    """As the norm operations take it: float32, the architecture's offset added."""
    return unpack(weight) + np.float32(config.norm_offset)


def _joined(biases: Sequence[RawTensor]) -> Floats:
    return np.concatenate([unpack(bias) for bias in biases])
