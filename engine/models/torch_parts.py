"""The computation of a model's parts on torch: one class or function for each kind of part.

The input x of a part is [tokens, columns]. The x of attention is the product with the matrices of
q, k and v, [tokens, (q + 2 kv) heads * dim]; with latent attention it has no v.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pdserve.engine.execution import Batch, Ints
from pdserve.engine.models.config import UnsupportedModel
from pdserve.engine.models.parts import (
    Activate,
    Attention,
    Expert,
    ExpertRouting,
    Experts,
    Gate,
    Gating,
    HeadLayerNorm,
    HeadLinear,
    HeadNorm,
    LayerNorm,
    Linear,
    Norm,
    Part,
    Rope,
    Scale,
    SliceNorm,
    TensorSpec,
    Xielu,
)
from pdserve.engine.models.rope import RopeConfig, RopeTable
from pdserve.engine.models.xielu import xielu_curve
from pdserve.engine.weights import VALUES, RawTensor
from pdserve.engine.weights.convert import unpack
from pdserve.kernels import reference

PLAIN_FORMATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
MIN_SUM = 1e-20  # lower bound of the divisor of normalized expert weights
Weight = Tensor | RawTensor  # plain numbers on the device; any other format as stored
Weights = Callable[[str], RawTensor]  # by Hugging Face name; called once per name


def to_device(raw: RawTensor, dtype: torch.dtype, device: torch.device) -> Weight:
    """Put a weight of plain numbers of `dtype` on the device; return any other weight as it is
    stored."""
    if raw.format != PLAIN_FORMATS[dtype]:
        return raw
    return torch.from_numpy(raw.parts[VALUES]).view(dtype).to(device)


def expand(weight: Weight, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a weight's values in `dtype`; a stored weight is expanded at each call, which is
    slow."""
    if isinstance(weight, Tensor):
        return weight
    return torch.from_numpy(unpack(weight)).to(device, dtype)


def stack(
    raws: Sequence[RawTensor], dtype: torch.dtype, device: torch.device
) -> tuple[Weight, ...]:
    """Join matrices that multiply the same input, so that one product computes all; if one of them
    is in stored form, return them separately."""
    weights = [to_device(raw, dtype, device) for raw in raws]
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(tensors) < len(weights):
        return tuple(weights)
    return (torch.cat(tensors) if len(tensors) > 1 else tensors[0],)


def rows(weight: Weight, index: Ints, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return some rows of a matrix [V, N] in `dtype`: row numbers [T] to [T, N]. Only those rows
    are expanded."""
    if isinstance(weight, Tensor):
        return weight.index_select(0, torch.from_numpy(index).to(device))
    return expand(weight.rows(index), dtype, device)


@dataclass(slots=True)
class RopeTensors:
    """A rope's tables of cos and sin on a device, float32 [positions, rotary_dim / 2], shared by
    all layers with that rope."""

    table: RopeTable
    device: torch.device
    cos: Tensor
    sin: Tensor

    def reserve(self, num_positions: int) -> None:
        """Extend the tables, if necessary, to cover positions [0, num_positions)."""
        if num_positions > len(self.cos):
            self.table.reserve(num_positions)
            self.cos = torch.from_numpy(self.table.cos).to(self.device)
            self.sin = torch.from_numpy(self.table.sin).to(self.device)


@dataclass(frozen=True, slots=True)
class Setup:
    """What the objects that compute parts are made from: weights, dtype, device and rope tables."""

    weights: Weights
    dtype: torch.dtype
    device: torch.device
    ropes: dict[RopeConfig, RopeTensors]

    def vector(self, spec: TensorSpec, offset: float = 0.0) -> Tensor:
        """Return a tensor as float32 with `offset` added, which some architectures add to the
        weights of norms."""
        return expand(self.weights(spec.name), torch.float32, self.device) + offset


@dataclass(frozen=True, slots=True)
class LayerStep:
    """The data of one step for one layer: the batch, and the layer's KV cache."""

    batch: Batch[Tensor]
    kv: Tensor  # of this layer, [blocks, 2, K, block_size, D]
    group: int  # index of the layer's group in batch.groups
    kv_only: bool = False  # compute only keys and values in this layer


class TorchPart(Protocol):
    """A part of a layer (engine/models/parts.py) with its weights, ready to run on torch."""

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """Map x [tokens, columns] to the part's result; the call may overwrite x."""


_kinds: dict[type[Part], Callable[[Any, Setup], TorchPart]] = {}
Maker = TypeVar("Maker", bound=Callable[[Any, Setup], TorchPart])


def computes(kind: type[Part]) -> Callable[[Maker], Maker]:
    """Register the decorated class or function as the maker of the objects that compute parts of
    type `kind`; it is called with (part, setup). Raises ValueError if the kind already has a
    maker."""

    def note(maker: Maker) -> Maker:
        if kind in _kinds:
            raise ValueError(
                f"part {kind.__name__} is registered twice: only one maker may compute it"
            )
        _kinds[kind] = maker
        return maker

    return note


def make_part(part: Part, setup: Setup) -> TorchPart:
    """Make the object that computes a part on torch. Raises UnsupportedModel for a kind of part
    that has no registered maker."""
    if type(part) not in _kinds:
        raise UnsupportedModel(
            f"the reference kernels cannot compute {type(part).__name__}: "
            "nothing is registered for this kind of part"
        )
    return _kinds[type(part)](part, setup)


@computes(Linear)
class TorchLinear:
    """Computes y = x W^T + b, where W has the rows of all the part's matrices in order.

    Stored (quantized) weights are expanded at each use. This is slow, and the reference for kernels
    that compute on the packed blocks.
    """

    def __init__(self, part: Linear, setup: Setup) -> None:
        self._setup = setup
        dtype, device = setup.dtype, setup.device
        self._parts = stack([setup.weights(w.name) for w in part.weights], dtype, device)
        biases = [expand(setup.weights(b.name), dtype, device) for b in part.biases]
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor, step: LayerStep | None = None) -> Tensor:
        """Multiply x [T, N] with all matrices and add the biases: [T, rows of all matrices]."""
        dtype, device = self._setup.dtype, self._setup.device
        if len(self._parts) == 1:
            return reference.linear(x, expand(self._parts[0], dtype, device), self._bias)
        products = [reference.linear(x, expand(part, dtype, device)) for part in self._parts]
        y = torch.cat(products, dim=1)
        return y if self._bias is None else y + self._bias


@computes(HeadLinear)
class TorchHeadLinear:
    """Computes a product with a separate matrix for each head."""

    def __init__(self, part: HeadLinear, setup: Setup) -> None:
        self._setup = setup
        self._kept = part.kept
        *heads, self._outputs, self._inputs = part.weight.shape
        self._heads = heads[0] if heads else 1
        self._weight = to_device(setup.weights(part.weight.name), setup.dtype, setup.device)

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """Multiply each head's inputs with the head's matrix: maps x [T, heads * (kept + inputs) +
        rest] to [T, heads * (kept + outputs) + rest]."""
        weight = expand(self._weight, self._setup.dtype, self._setup.device)
        weight = weight.view(self._heads, self._outputs, self._inputs)
        size = self._heads * (self._kept + self._inputs)
        heads = x[:, :size].reshape(len(x), self._heads, -1)
        kept, inputs = heads[:, :, : self._kept], heads[:, :, self._kept :]
        products = [reference.linear(inputs[:, n], matrix) for n, matrix in enumerate(weight)]
        head_outputs = torch.cat((kept, torch.stack(products, 1)), 2).flatten(1)
        return torch.cat((head_outputs, x[:, size:]), 1)


@computes(Norm)
def norm(part: Norm, setup: Setup) -> TorchPart:
    weight = setup.vector(part.weight, part.offset)
    return lambda x, step: reference.rms_norm(x, weight, part.eps)


@computes(LayerNorm)
def layer_norm(part: LayerNorm, setup: Setup) -> TorchPart:
    weight = setup.vector(part.weight)
    bias = setup.vector(part.bias) if part.bias else None
    return lambda x, step: reference.layer_norm(x, weight, bias, part.eps)


@computes(Gate)
def gate(part: Gate, setup: Setup) -> TorchPart:
    def gate_halves(x: Tensor, step: LayerStep) -> Tensor:
        first, second = x.chunk(2, dim=1)
        return reference.gated(first, second, part.activation)

    return gate_halves


@computes(Activate)
def activate(part: Activate, setup: Setup) -> TorchPart:
    return lambda x, step: reference.activated(x, part.activation)


@computes(Xielu)
def xielu(part: Xielu, setup: Setup) -> TorchPart:
    curve = xielu_curve(part, setup.weights)
    return lambda x, step: reference.xielu(x, **curve)


@computes(Scale)
def scale(part: Scale, setup: Setup) -> TorchPart:
    return lambda x, step: x * part.factor  # rounded to x's dtype


@computes(HeadNorm)
def head_norm(part: HeadNorm, setup: Setup) -> TorchPart:
    q_size, kv_size = part.heads.q * part.heads.dim, part.heads.kv * part.heads.dim
    q, k = (setup.vector(spec, part.offset) for spec in (part.q, part.k))

    def norm_in_place(x: Tensor, step: LayerStep) -> Tensor:
        for columns, weight in ((x[:, :q_size], q), (x[:, q_size : q_size + kv_size], k)):
            normed = columns.view(len(x), -1, len(weight))
            normed.copy_(reference.rms_norm(normed, weight, part.eps))
        return x

    return norm_in_place


@computes(HeadLayerNorm)
def head_layer_norm(part: HeadLayerNorm, setup: Setup) -> TorchPart:
    weights = torch.stack([setup.vector(spec) for spec in (*part.q, *part.k)])  # [heads, dim]
    ones = torch.ones(part.heads.dim, device=weights.device)

    def norm_in_place(x: Tensor, step: LayerStep) -> Tensor:
        heads = x[:, : weights.numel()].view(len(x), *weights.shape)
        normed = reference.layer_norm(heads.float(), ones, None, part.eps)
        heads.copy_(normed * weights)
        return x

    return norm_in_place


@computes(SliceNorm)
def slice_norm(part: SliceNorm, setup: Setup) -> TorchPart:
    weight = setup.vector(part.weight)

    def norm_in_place(x: Tensor, step: LayerStep) -> Tensor:
        columns = x[:, part.begin : part.begin + len(weight)]
        columns.copy_(reference.rms_norm(columns, weight, part.eps))
        return x

    return norm_in_place


@computes(Rope)
def rope(part: Rope, setup: Setup) -> TorchPart:
    heads, table = part.heads, setup.ropes[part.config]
    end = part.begin + (heads.q + heads.kv) * heads.dim

    def rotate_in_place(x: Tensor, step: LayerStep) -> Tensor:
        qk = x[:, part.begin : end].view(len(x), -1, heads.dim)
        qk.copy_(reference.rope(qk, step.batch.positions, table.cos, table.sin))
        return x

    return rotate_in_place


@computes(Attention)
class TorchAttention:
    """Computes attention over the KV cache that each step brings; owns no keys or values."""

    def __init__(self, part: Attention, setup: Setup) -> None:
        self._part = part
        self._sinks = setup.vector(part.sinks) if part.sinks else None

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """Store the step's keys and values in the cache. Return the attention result [T, q heads *
        dim], or no rows if `step.kv_only`."""
        part, batch, heads = self._part, step.batch, self._part.heads
        in_heads, v_begin = x.view(len(x), -1, heads.dim), heads.q + heads.kv
        k, v = in_heads[:, heads.q : v_begin], None if part.latent else in_heads[:, v_begin:]
        reference.write_kv(step.kv, k, v, batch.groups[step.group].slots)
        if step.kv_only:
            return x[:0]
        attended = reference.paged_attention(
            in_heads[:, : heads.q],
            step.kv,
            batch.groups[step.group].block_table,
            batch.starts,
            batch.kv_lens,
            batch.num_decode_rows,
            part.scale,
            part.window,
            part.soft_cap,
            self._sinks,
            part.causal,
        )
        return attended[:, :, -part.latent :].flatten(1)  # all of them if latent is 0


def choose_experts(
    logits: Tensor, correction: Tensor | None, routing: ExpertRouting
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts by router logits, float32 [T, experts], and correction,
    [experts].

    Return the experts, int64 [T, top_k], best first, and their weights, float32 [T, top_k]. Source:
    arXiv:2412.19437, 2.1.2.
    """
    scores = torch.softmax(logits, -1) if routing.scores == "softmax" else torch.sigmoid(logits)
    ranks = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = ranks.view(len(ranks), routing.groups, -1)
        quality = grouped.topk(routing.group_best, dim=-1).values.sum(-1)
        kept_groups = _best(quality, routing.kept_groups)
        dropped = torch.ones_like(quality, dtype=torch.bool).scatter_(1, kept_groups, False)
        ranks = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    chosen = _best(ranks, routing.top_k)
    weights = scores.gather(1, chosen)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + MIN_SUM)
    return chosen, weights * routing.scale


def _best(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest values of each row; ties go to the first."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


class TorchExpert:
    """Computes one expert, a gated MLP."""

    def __init__(self, expert: Expert, activation: Gating, setup: Setup) -> None:
        self._gate_up = TorchLinear(expert.gate_up, setup)
        self._down = TorchLinear(expert.down, setup)
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=1)
        return self._down(reference.gated(gate, up, self._activation))


@computes(Experts)
class TorchExperts:
    """Computes a mixture of experts, x [T, hidden] to [T, hidden]: one expert after the other, each
    on all tokens that chose it."""

    def __init__(self, part: Experts, setup: Setup) -> None:
        self._routing = part.routing
        self._router = setup.vector(part.router)
        self._router_bias = setup.vector(part.router_bias) if part.router_bias else None
        self._correction = setup.vector(part.correction) if part.correction else None
        self._gate = setup.vector(part.shared_gate) if part.shared_gate else None
        self._experts = [TorchExpert(e, part.activation, setup) for e in part.experts]
        self._shared = TorchExpert(part.shared, part.activation, setup) if part.shared else None

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        logits = reference.linear(x.float(), self._router, self._router_bias)
        chosen, weights = choose_experts(logits, self._correction, self._routing)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self._experts):
            tokens, ranks = torch.where(chosen == n)
            if len(tokens):
                out[tokens] += expert(x[tokens]) * weights[tokens, ranks, None].to(x.dtype)
        if self._shared is None:
            return out
        y = self._shared(x)
        if self._gate is not None:
            y = y * torch.sigmoid(reference.linear(x.float(), self._gate)).to(x.dtype)
        return out + y
