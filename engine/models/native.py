"""The decoder on the native CPU kernels: any ModelConfig, a whole step in two calls.

Owns the packed weights. Keys lie [head_dim, block_size] within a block of its KV cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.execution.batch import Batch, Ints
from pdserve.engine.kv.spec import LayerGroup
from pdserve.engine.models.config import ModelConfig, UnsupportedModel
from pdserve.engine.models.layer import EMBEDDING, HEAD, final_norm, layer_parts
from pdserve.engine.models.parts import Add, Attention, Gate, HeadNorm, Linear, Norm, Part, Rope
from pdserve.engine.models.rope import RopeTable
from pdserve.engine.weights.format import RawTensor
from pdserve.engine.weights.unpack import as_plain, unpack
from pdserve.kernels import _native
from pdserve.kernels.cpu import FORMATS, CpuKernels

Floats = NDArray[np.float32]
Weights = Callable[[str], RawTensor]

# The order of the stack's operations; norms may be absent.
PLACES: tuple[tuple[type[Part], str], ...] = (
    (Norm, "attn_in"),
    (Linear, "qkv"),
    (HeadNorm, ""),
    (Rope, ""),
    (Attention, ""),
    (Linear, "out"),
    (Norm, "attn_out"),
    (Add, ""),
    (Norm, "ffn_in"),
    (Linear, "gate_up"),
    (Gate, ""),
    (Linear, "down"),
    (Norm, "ffn_out"),
    (Add, ""),
)


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
        embedding = self._pack(weights(EMBEDDING))
        self._stack.set_embedding(embedding)
        for n in range(config.num_layers):
            self._add_layer(n, weights)
        norm = final_norm(config)
        vector = _vector(weights(norm.weight.name), norm.offset)
        self._stack.set_head(vector, embedding if config.tied_head else self._pack(weights(HEAD)))
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
        layer = self.config.layers[n]
        norms: dict[str, Floats] = {}
        matrices: dict[str, list[_native.Matrix]] = {}
        biases: dict[str, Floats] = {}
        for place, part in _placed(layer_parts(self.config, n)):
            match part:
                case Norm():
                    norms[place] = _vector(weights(part.weight.name), part.offset)
                case HeadNorm():
                    norms["q_norm"] = _vector(weights(part.q.name), part.offset)
                    norms["k_norm"] = _vector(weights(part.k.name), part.offset)
                case Linear():
                    matrices[place] = [self._pack(weights(spec.name)) for spec in part.weights]
                    if part.biases:
                        vectors = [unpack(weights(spec.name)) for spec in part.biases]
                        biases[place] = np.concatenate(vectors)
        self._stack.add_layer(
            group=self._group_of[n],
            window=layer.window,
            rope=list(self._ropes).index(layer.rope),
            norms=norms,
            weights=matrices,
            biases=biases,
        )

    def _pack(self, weight: RawTensor) -> "_native.Matrix":
        """Formats that no kernel knows are expanded to float32."""
        stored = weight if weight.format in FORMATS else as_plain(weight, "F32")
        (data,) = stored.parts.values()
        return self._kernels.pack(data, stored.format, *stored.shape)


def _vector(weight: RawTensor, offset: float) -> Floats:
    """As the norm operations take it: float32, the architecture's offset added."""
    return unpack(weight) + np.float32(offset)


def _placed(parts: Sequence[Part]) -> Iterator[tuple[str, Part]]:
    """The parts with their places in the stack. Raises UnsupportedModel for one that has none."""
    left = list(parts)
    for kind, place in PLACES:
        if left and type(left[0]) is kind:
            yield place, left.pop(0)
        elif kind not in (Norm, HeadNorm):
            break
    if left:
        raise UnsupportedModel(
            f"the native kernels cannot compute {type(left[0]).__name__} here; "
            "--kernels reference can"
        )
