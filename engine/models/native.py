"""The decoder on the native CPU kernels: any ModelConfig, a whole step in two calls.

Owns the packed weights. Keys lie [head_dim, block_size] within a block of its KV cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.engine.execution.batch import Batch, Ints
from pdserve.engine.kv.spec import LayerGroup
from pdserve.engine.models.build import norm_weight
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.decoder import LayerKv
from pdserve.engine.models.layers.rope import RopeTable
from pdserve.engine.weights.format import RawTensor
from pdserve.engine.weights.stored import Weight, Weights, expand
from pdserve.kernels import _native
from pdserve.kernels.cpu import FORMATS, CpuKernels

Floats = NDArray[np.float32]
Part = tuple[str, dict[str, object]]  # kind and fields, as `_native.Stack.add_layer` takes them
Pack = Callable[[Weight], "_native.Matrix"]
STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


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
        self._kv: LayerKv | None = None
        self._stack = _native.Stack(
            kernels.context,
            hidden=config.hidden_size,
            embed_scale=config.embed_scale,
            logit_soft_cap=config.logit_soft_cap,
        )
        ropes = dict.fromkeys(layer.rope for layer in config.layers)
        cpu = torch.device("cpu")
        self._ropes = {rope: RopeTable(rope, config.context_len, cpu) for rope in ropes}
        self._rope_len = 0
        self._reserve_positions(1)
        embedding = self._pack(weights("model.embed_tokens.weight"))
        self._stack.set_embedding(embedding)
        tables = {rope: index for index, rope in enumerate(self._ropes)}
        groups = {n: g for g, group in enumerate(self.kv_groups) for n in group.layers}
        for n, layer in enumerate(config.layers):
            table, group = tables[layer.rope], groups[n]
            parts = layer_parts(config, n, weights, self._pack, table, group)
            self._stack.add_layer(parts)
        norm = norm_fields(config, weights("model.norm.weight"))
        head = embedding if config.tied_head else self._pack(weights("lm_head.weight"))
        self._stack.set_head(norm, head)
        self._logits = np.empty((0, config.vocab_size), np.float32)

    def forward(self, batch: Batch[Ints], kv: LayerKv) -> Floats:
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

    def _attach(self, kv: LayerKv) -> None:
        pools = [kv.layer(n)[0] for n in range(self.config.num_layers)]
        blocks = [pool.view(len(pool), -1).view(torch.uint8).numpy() for pool in pools]
        block_size = blocks[0].shape[1] // self.kv_groups[0].block_bytes(1)
        self._stack.set_kv(blocks, self._kv_dtype, block_size)
        self._kv = kv

    def _reserve_positions(self, num_positions: int) -> None:
        if num_positions <= self._rope_len:
            return
        for index, table in enumerate(self._ropes.values()):
            table.reserve(num_positions)
            self._stack.set_rope(index, table.cos.numpy(), table.sin.numpy())
        self._rope_len = min(len(table.cos) for table in self._ropes.values())

    def _pack(self, weight: Weight) -> "_native.Matrix":
        """Formats that no kernel knows are expanded to float32."""
        if isinstance(weight, RawTensor) and weight.format not in FORMATS:
            weight = expand(weight, torch.float32)
        if isinstance(weight, RawTensor):
            rows, cols = weight.shape
            return self._kernels.pack(weight.data, weight.format, rows, cols)
        return self._kernels.pack(weight, STORED[weight.dtype], *weight.shape)


def layer_parts(
    config: ModelConfig, n: int, weights: Weights, pack: Pack, table: int, group: int
) -> list[Part]:
    """The parts of layer n in the order in which a row goes through them.

    `table` is the index of its rope table, `group` that of its KV group.
    """
    prefix = f"model.layers.{n}."
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim

    def linear(has_bias: bool, *names: str) -> Part:
        matrices = [pack(weights(f"{prefix}{name}.weight")) for name in names]
        biases = [weights(f"{prefix}{name}.bias") for name in names] if has_bias else []
        return "linear", {"matrices": matrices, "bias": _joined(biases) if biases else None}

    def norm(name: str | None) -> list[Part]:
        if name is None:
            return []
        return [("norm", norm_fields(config, weights(f"{prefix}{name}.weight")))]

    def head_norm(name: str, first: int, count: int) -> list[Part]:
        if not config.qk_norm:
            return []
        fields = norm_fields(config, weights(f"{prefix}self_attn.{name}.weight"))
        return [("head_norm", fields | {"first": first, "heads": count})]

    places = config.norms
    attention: dict[str, object] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": size,
        "scale": config.attn_scale,
        "soft_cap": config.attn_soft_cap,
        "window": config.layers[n].window,
        "group": group,
    }
    return [
        *norm(places.attn_in),
        linear(config.qkv_bias, *(f"self_attn.{part}_proj" for part in "qkv")),
        *head_norm("q_norm", 0, heads),
        *head_norm("k_norm", heads, kv_heads),
        ("rope", {"table": table, "heads": heads + kv_heads, "head_dim": size}),
        ("attention", attention),
        linear(config.o_bias, "self_attn.o_proj"),
        *norm(places.attn_out),
        ("add", {}),
        *norm(places.ffn_in),
        linear(config.ffn_bias, "mlp.gate_proj", "mlp.up_proj"),
        ("gate", {"activation": config.activation}),
        linear(config.ffn_bias, "mlp.down_proj"),
        *norm(places.ffn_out),
        ("add", {}),
    ]


def norm_fields(config: ModelConfig, weight: Weight) -> dict[str, object]:
    """Weight and eps of a norm."""
    return {"weight": norm_weight(config, weight).numpy(), "eps": config.norm_eps}


def _joined(biases: Sequence[Weight]) -> Floats:
    joined: Floats = torch.cat([expand(bias, torch.float32) for bias in biases]).numpy()
    return joined
