"""The kinds of parts that a layer is made of: plain data that every backend computes.

A layer has the residual stream and one value x, both [tokens, hidden]; at the start of the layer x
is the stream. The parts change x one after the other; `Add` adds x to the stream, and x becomes the
sum. To add a kind, subclass `Part` and write the code that computes it
(engine/models/torch_parts.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from pdserve.engine.models.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]
Gating = Activation | Literal["swiglu_oai"]  # of a gate and the gated values; the last is gpt-oss's


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The name and shape of a tensor that a part loads."""

    name: str  # Hugging Face's name
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Heads:
    """How a row of x is divided into heads of `dim` values: `q` query heads, then `kv` key heads
    and `kv` value heads."""

    q: int
    kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class Part:
    """One operation of a layer; the base class of all kinds of parts."""

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the tensors in all fields of the part, in the order in which they are loaded."""
        return tuple(
            tensor for field in fields(self) for tensor in _tensors(getattr(self, field.name))
        )


def _tensors(value: object) -> Iterator[TensorSpec]:
    match value:
        case TensorSpec():
            yield value
        case Part():
            yield from value.tensors()
        case tuple():
            for item in value:
                yield from _tensors(item)


@dataclass(frozen=True, slots=True)
class Norm(Part):
    """RMS norm over the last dim, times weight + offset."""

    weight: TensorSpec
    offset: float
    eps: float


@dataclass(frozen=True, slots=True)
class LayerNorm(Part):
    """Layer norm: (x - mean) / deviation over the last dim, times weight, plus bias."""

    weight: TensorSpec
    bias: TensorSpec | None
    eps: float


@dataclass(frozen=True, slots=True)
class Linear(Part):
    """Products of the same x with several matrices, side by side; biases for all matrices or for
    none."""

    weights: tuple[TensorSpec, ...]
    biases: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class SliceNorm(Part):
    """RMS norm of a slice of x: the values from `begin` on, as many as the weight has."""

    weight: TensorSpec
    begin: int
    eps: float


@dataclass(frozen=True, slots=True)
class HeadLinear(Part):
    """A product with a separate matrix for each head.

    x is [tokens, heads * (kept + inputs) + rest] and becomes [tokens, heads * (kept + outputs) +
    rest]: the first `kept` values of a head stay, the others go through the head's matrix, and the
    `rest` values after the heads stay.
    """

    weight: TensorSpec  # [heads, outputs, inputs]; [outputs, inputs] for one head
    kept: int = 0
    rest: int = 0


@dataclass(frozen=True, slots=True)
class HeadNorm(Part):
    """RMS norm of q and of k, times weight + offset, over each head or over all heads as one row.
    The length of the weight is the number of values that are normed together."""

    heads: Heads
    q: TensorSpec
    k: TensorSpec
    offset: float
    eps: float


@dataclass(frozen=True, slots=True)
class HeadLayerNorm(Part):
    """Layer norm of each head of q and of k, without bias, with a separate weight for each head."""

    heads: Heads
    q: tuple[TensorSpec, ...]
    k: tuple[TensorSpec, ...]
    eps: float


@dataclass(frozen=True, slots=True)
class Rope(Part):
    """Rotary position embedding: rotates the heads of q and k by their position. The first head
    begins at column `begin` of x."""

    heads: Heads
    config: RopeConfig
    begin: int = 0


@dataclass(frozen=True, slots=True)
class Attention(Part):
    """Stores new keys and values in the cache and attends over all cached keys; x becomes [tokens,
    q heads * dim].

    A sink is a score in the softmax of a query head that belongs to no key. Latent attention stores
    keys only; the last `latent` values of a key are also its value, and x becomes [tokens, q heads
    * latent] (DeepSeek-V2, arXiv:2405.04434, 2.1, with the up-projections of keys and values as
    separate parts).

    If not `causal`, a token sees all keys of its sequence, or with a window as many from itself on
    as up to itself; a step then has all tokens of each sequence.
    """

    heads: Heads
    scale: float
    soft_cap: float
    window: int
    sinks: TensorSpec | None = None  # [q heads]
    latent: int = 0  # number of a key's values that are its value; 0: separate values
    causal: bool = True


@dataclass(frozen=True, slots=True)
class Gate(Part):
    """Gated activation: activation(first half of x) * second half of x."""

    activation: Activation


@dataclass(frozen=True, slots=True)
class Activate(Part):
    """The activation function of x, elementwise."""

    activation: Activation


@dataclass(frozen=True, slots=True)
class Xielu(Part):
    """The activation xIELU of x, elementwise, whose curve is learned (arXiv:2411.13010):
    a x^2 + beta x for x > 0, else b (e^min(x, eps) - 1 - x) + beta x, where a = softplus(alpha_p)
    and b = beta + softplus(alpha_n)."""

    alpha_p: TensorSpec
    alpha_n: TensorSpec
    beta: TensorSpec
    eps: TensorSpec


@dataclass(frozen=True, slots=True)
class Scale(Part):
    """Multiplies x by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Replace(Part):
    """Makes x the residual stream."""


@dataclass(frozen=True, slots=True)
class Hold(Part):
    """Sets x aside for the next Add; x becomes the unchanged residual stream."""


@dataclass(frozen=True, slots=True)
class Add(Part):
    """Adds x to the residual stream, plus the value that Hold set aside if `held`; x becomes the
    sum."""

    held: bool = False


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """The rule that chooses each token's experts from its router logits, and their weights in the
    sum.

    Scores are the softmax or the sigmoid of all logits. An expert's rank is its score plus its
    correction. The `top_k` experts of highest rank are chosen; ties go to the first. If experts are
    in groups, only those of the `kept_groups` best groups take part; a group's quality is the sum
    of its `group_best` highest ranks. The weight of a chosen expert is its score, divided by the
    sum of the chosen experts' scores if `normalized`, times `scale`.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1


@dataclass(frozen=True, slots=True)
class Expert(Part):
    """One expert, a gated MLP: the products of gate and up, then the product of down."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts(Part):
    """A mixture of experts: the weighted sum of the results of each token's chosen experts, in the
    order of the experts, plus the shared expert's result, if there is a shared expert. If it has a
    gate, its result is multiplied by the sigmoid of that gate.

    The router computes in float32.
    """

    router: TensorSpec  # [experts, hidden]
    router_bias: TensorSpec | None  # [experts]
    correction: TensorSpec | None  # [experts], for the choice only
    shared_gate: TensorSpec | None  # [1, hidden]
    experts: tuple[Expert, ...]
    shared: Expert | None
    routing: ExpertRouting
    activation: Gating
