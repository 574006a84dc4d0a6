"""The decoder on the native CPU kernels, for any ModelConfig. A step is two native calls: one for
the hidden states, one for the logits.

Owns the packed weights. The KV cache holds the keys of a block as [head_dim, block_size].
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.execution import Batch, Ints
from pdserve.engine.kv import LayerGroup
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models.config import ModelConfig, UnsupportedModel
from pdserve.engine.models.layer import EMBEDDING, HEAD, HEAD_BIAS, final_norm, layer_parts
from pdserve.engine.models.parts import (
    Activate,
    Add,
    Attention,
    Experts,
    Gate,
    HeadLayerNorm,
    HeadLinear,
    HeadNorm,
    Hold,
    LayerNorm,
    Linear,
    Norm,
    Part,
    Replace,
    Rope,
    Scale,
    SliceNorm,
    TensorSpec,
    Xielu,
)
from pdserve.engine.models.rope import RopeTable
from pdserve.engine.models.xielu import xielu_curve
from pdserve.engine.weights import PLAIN, RawTensor, as_plain, same_order
from pdserve.engine.weights.convert import unpack
from pdserve.engine.weights.formats import SCALES, ZEROS, formats, scales_of
from pdserve.kernels import _native
from pdserve.kernels.cpu import FORMATS, GROUPED, CpuKernels

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]
Weights = Callable[[str], RawTensor]
NativePart = tuple[str, dict[str, object]]  # kind and fields, in the form of the native stack


class NativeDecoder:
    """A transformer on the native CPU kernels, with the methods of `Decoder`;
    `weights` returns a stored weight by name."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: CpuKernels, kv_dtype: str
    ) -> None:
        self.config = config
        self.kv_groups: tuple[LayerGroup, ...] = tuple(
            replace(group, keys_by_dim=group.kind != "latent")
            for group in config.kv_groups(kv_dtype)
        )
        self.numerics = kernels.numerics
        self._kernels = kernels
        self._kv_dtype = kv_dtype
        self._kv: KvCache | None = None
        self._group_of = {n: g for g, group in enumerate(self.kv_groups) for n in group.layers}
        self._stack = _native.Stack(
            kernels.context,
            hidden=config.hidden_size,
            embed_scale=config.embed_scale,
            logit_scale=config.logit_scale,
            logit_soft_cap=config.logit_soft_cap,
        )
        self._expanded: Counter[str] = Counter()  # number of expanded weights, by their format
        self._ropes = {rope: RopeTable(rope, config.context_len) for rope in config.ropes}
        self._rope_len = 0
        self._reserve_positions(1)
        embedding = self._pack(EMBEDDING, weights(EMBEDDING))
        self._stack.set_embedding(embedding)
        if config.positions:
            table = config.positions.table(lambda name: unpack(weights(name)))
            self._stack.set_added_embedding(table)
        for n in range(config.num_layers):
            self._add_layer(n, weights)
        (norm,) = self._fields(final_norm(config), weights, 0)
        self._stack.set_head(
            norm,
            embedding if config.tied_head else self._pack(HEAD, weights(HEAD)),
            unpack(weights(HEAD_BIAS)) if config.head_bias else None,
        )
        self._logits = np.empty((0, config.vocab_size), np.float32)
        for format, count in self._expanded.items():
            log.warning(
                "%d weights of format %s are kept as float32: "
                "the native kernels cannot pack them as stored",
                count,
                format,
            )

    def forward(self, batch: Batch[Ints], kv: KvCache) -> Floats:
        """Compute one step in float32 like Decoder.forward. Raises ValueError for an index out of
        range."""
        if kv is not self._kv:
            self._attach(kv)
        self._reserve_positions(max(batch.kv_lens))
        added = None
        if self.config.positions:
            added = self.config.positions.rows(batch.token_ids, batch.positions, batch.starts)
        return self._stack.forward(
            batch.token_ids,
            batch.positions,
            batch.starts,
            batch.kv_lens,
            [group.block_table for group in batch.groups],
            [group.slots for group in batch.groups],
            batch.logit_tokens,
            batch.kv_only,
            added,
        )

    @property
    def shares(self) -> int:
        """Number of threads that each computed separate rows through all layers in the last step; 0
        if the step was not divided in this way."""
        return self._stack.shares

    def logits(self, hidden: Floats) -> Floats:
        """Return the logits of hidden states, float32 [n, vocab], in memory that the next call
        reuses."""
        if len(hidden) > len(self._logits):
            self._logits = np.empty((len(hidden), self.config.vocab_size), np.float32)
        out = self._logits[: len(hidden)]
        self._stack.logits(hidden, out)
        return out

    def states(self, hidden: Floats) -> Floats:
        """Return hidden states unchanged, because they are already in host memory."""
        return hidden

    def _attach(self, kv: KvCache) -> None:
        pools = [kv.layer(n)[0] for n in range(self.config.num_layers)]
        blocks = [pool.reshape(len(pool), -1).view(np.uint8) for pool in pools]
        self._stack.set_kv(blocks, self._kv_dtype, kv.spec.block_size)
        self._kv = kv

    def _reserve_positions(self, num_positions: int) -> None:
        if num_positions <= self._rope_len:
            return
        for index, table in enumerate(self._ropes.values()):
            table.reserve(num_positions)
            self._stack.set_rope(index, table.cos, table.sin)
        self._rope_len = min(
            (len(table.cos) for table in self._ropes.values()), default=self.config.context_len
        )

    def _add_layer(self, n: int, weights: Weights) -> None:
        group = self._group_of[n]
        parts = layer_parts(self.config, n)
        self._stack.add_layer(
            [native_part for p in parts for native_part in self._fields(p, weights, group)]
        )

    def _fields(self, part: Part, weights: Weights, group: int) -> list[NativePart]:
        """Load a part's weights and describe it to the native kernels as (kind, fields) pairs.
        Raises UnsupportedModel for a part that they cannot compute."""
        match part:
            case Norm():
                return [("norm", _norm(part, part.weight, weights))]
            case LayerNorm():
                bias = unpack(weights(part.bias.name)) if part.bias else None
                fields = {"weight": unpack(weights(part.weight.name)), "bias": bias}
                return [("layer_norm", fields | {"eps": part.eps})]
            case Linear():
                return self._linear(part, weights)
            case HeadNorm():
                heads = part.heads
                q_size, kv_size = heads.q * heads.dim, heads.kv * heads.dim
                q = {"begin": 0, "heads": q_size // part.q.shape[0]}
                k = {"begin": q_size, "heads": kv_size // part.k.shape[0]}
                return [
                    ("head_norm", _norm(part, part.q, weights) | q),
                    ("head_norm", _norm(part, part.k, weights) | k),
                ]
            case HeadLayerNorm():
                weight = np.concatenate([unpack(weights(s.name)) for s in (*part.q, *part.k)])
                count = len(part.q) + len(part.k)
                return [("head_layer_norm", {"weight": weight, "eps": part.eps, "heads": count})]
            case Rope():
                heads, table = part.heads, list(self._ropes).index(part.config)
                rotated = {"heads": heads.q + heads.kv, "head_dim": heads.dim}
                return [("rope", {"table": table, **rotated, "begin": part.begin})]
            case Attention():
                heads = part.heads
                shape = {"heads": heads.q, "kv_heads": heads.kv, "head_dim": heads.dim}
                scores = {"scale": part.scale, "soft_cap": part.soft_cap, "window": part.window}
                sinks = unpack(weights(part.sinks.name)) if part.sinks else None
                others = {"sinks": sinks, "latent": part.latent, "group": group}
                others["causal"] = int(part.causal)
                return [("attention", {**shape, **scores, **others})]
            case SliceNorm():
                weight = unpack(weights(part.weight.name))
                span = {"begin": part.begin, "heads": 1}
                return [("head_norm", {"weight": weight, "eps": part.eps, **span})]
            case HeadLinear():
                return self._head_linear(part, weights)
            case Gate():
                return [("gate", {"activation": part.activation})]
            case Activate():
                return [("activate", {"activation": part.activation})]
            case Xielu():
                return [("xielu", {**xielu_curve(part, weights)})]
            case Scale():
                return [("scale", {"factor": part.factor})]
            case Experts():
                return [("experts", self._experts(part, weights))]
            case Replace():
                return [("replace", {})]
            case Hold():
                return [("hold", {})]
            case Add():
                return [("add", {"held": int(part.held)})]
        raise UnsupportedModel(
            f"the native kernels cannot compute {type(part).__name__}; use --kernels reference"
        )

    def _linear(self, part: Linear, weights: Weights) -> list[NativePart]:
        """Describe a product to the native kernels. If the columns of the first weight are stored
        in another order, reorder the input and the other weights to match."""
        names = [spec.name for spec in part.weights]
        first = weights(names[0])
        matrices = [self._pack(names[0], first, first.columns)]
        matrices += [self._pack(name, weights(name), first.columns) for name in names[1:]]
        vectors = [unpack(weights(spec.name)) for spec in part.biases]
        bias = np.concatenate(vectors) if vectors else None
        linear: NativePart = ("linear", {"matrices": matrices, "bias": bias})
        return (
            [linear] if first.columns is None else [("reorder", {"order": first.columns}), linear]
        )

    def _head_linear(self, part: HeadLinear, weights: Weights) -> list[NativePart]:
        """Describe a product per head to the native kernels. If the columns of the matrices are
        stored in another order, reorder the input of each head to match."""
        raw = weights(part.weight.name)
        stack = [raw.matrix(n) for n in range(raw.shape[0])] if len(raw.shape) > 2 else [raw]
        matrices = [self._pack(part.weight.name, matrix, raw.columns) for matrix in stack]
        linear: NativePart = ("head_linear", {"matrices": matrices, "kept": part.kept})
        if raw.columns is None:
            return [linear]
        head = np.concatenate((np.arange(part.kept), part.kept + raw.columns))
        order = (np.arange(len(stack))[:, None] * len(head) + head).reshape(-1)
        rest = np.arange(len(order), len(order) + part.rest)
        return [("reorder", {"order": np.concatenate((order, rest))}), linear]

    def _experts(self, part: Experts, weights: Weights) -> dict[str, object]:
        """Return the fields that describe a mixture of experts to the native kernels, with its
        weights loaded in the order of the part's fields."""

        def router(spec: TensorSpec) -> _native.Matrix:  # choices need full precision
            return self._pack(spec.name, as_plain(weights(spec.name), "F32"))

        def vector(spec: TensorSpec | None) -> Floats | None:
            return unpack(weights(spec.name)) if spec else None

        def packed(linear: Linear) -> tuple[list[_native.Matrix], list[Floats]]:
            matrices = [self._pack(spec.name, weights(spec.name)) for spec in linear.weights]
            return matrices, [unpack(weights(spec.name)) for spec in linear.biases]

        routers = [router(part.router)]
        bias, correction = vector(part.router_bias), vector(part.correction)
        if part.shared_gate:
            routers.append(router(part.shared_gate))
        gates, ups, downs, gate_up_biases, down_biases = [], [], [], [], []
        for expert in part.experts:
            (gate, up), gate_up_bias = packed(expert.gate_up)
            (down,), down_bias = packed(expert.down)
            gates.append(gate)
            ups.append(up)
            downs.append(down)
            if gate_up_bias:
                gate_up_biases.append(np.concatenate(gate_up_bias))
            down_biases += down_bias
        shared: list[_native.Matrix] = []
        if part.shared:
            if part.shared.gate_up.biases or part.shared.down.biases:
                raise UnsupportedModel(
                    "the native kernels do not support biases of a shared expert; "
                    "use --kernels reference"
                )
            shared = [*packed(part.shared.gate_up)[0], *packed(part.shared.down)[0]]
        routing = part.routing
        return {
            "router": routers,
            "bias": bias,
            "correction": correction,
            "gates": gates,
            "ups": ups,
            "downs": downs,
            "gate_up_biases": np.stack(gate_up_biases) if gate_up_biases else None,
            "down_biases": np.stack(down_biases) if down_biases else None,
            "shared": shared,
            "top_k": routing.top_k,
            "sigmoid": int(routing.scores == "sigmoid"),
            "normalized": int(routing.normalized),
            "scale": routing.scale,
            "groups": routing.groups,
            "kept_groups": routing.kept_groups,
            "group_best": routing.group_best,
            "activation": part.activation,
        }

    def _pack(
        self, name: str, raw: RawTensor, columns: NDArray[np.int64] | None = None
    ) -> "_native.Matrix":
        """Pack a stored weight for an input whose values are in the order of `columns`. A weight
        that the kernels cannot read as stored is expanded to float32. Raises UnsupportedModel for
        values that the kernels do not support."""
        if raw.format not in PLAIN:
            raw = formats()[raw.format].packable(raw)
        if raw.format in GROUPED and fits_groups(raw) and same_order(raw.columns, columns):
            try:
                return self._kernels.pack_groups(raw.format, **raw.parts)
            except ValueError as error:
                raise UnsupportedModel(f"tensor {name}: {error}") from error
        if raw.format in FORMATS and columns is None:
            (data,) = raw.parts.values()
            return self._kernels.pack(data, raw.format, *raw.shape)
        if not self._expanded[raw.format]:
            log.warning(
                "tensor %s cannot be packed as %s by the native kernels; it is kept as float32",
                name,
                raw.format,
            )
        self._expanded[raw.format] += 1
        if raw.format in GROUPED and not has_finite_scales(raw):
            raise UnsupportedModel(f"tensor {name}: a scale is infinite or NaN")
        values = unpack(raw) if columns is None else unpack(raw)[:, columns]
        return self._kernels.pack(values, "F32", *raw.shape)


def fits_groups(raw: RawTensor) -> bool:
    """Return whether the native kernels support a weight's group sizes, the numbers of columns that
    share a scale."""
    width = raw.shape[1] // raw.parts[SCALES].shape[1]
    if raw.format == "INT8" and width == 16 and ZEROS not in raw.parts:
        return raw.shape[1] % 32 == 0
    if raw.format in ("INT4", "INT8"):
        return bool(width % 32 == 0)
    return raw.format == "FP8" or raw.shape[1] % 32 == 0


def has_finite_scales(raw: RawTensor) -> bool:
    with np.errstate(all="ignore"):  # a divisor may be 0
        return bool(np.isfinite(scales_of(raw)).all())


def _norm(part: Norm | HeadNorm, spec: TensorSpec, weights: Weights) -> dict[str, object]:
    """Return the fields of a native norm: the weight as float32 with the architecture's offset
    added, and eps."""
    return {"weight": unpack(weights(spec.name)) + np.float32(part.offset), "eps": part.eps}
