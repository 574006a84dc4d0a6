"""The kinds of parts that a layer is made of: plain data that every backend computes.

A layer has the residual stream and one value x, both [tokens, hidden]; at its start x is the
stream. Its parts change x one after the other; `Add` adds x to the stream and continues with the
sum. To add a kind, subclass `Part` and write what computes it (engine/models/torch_parts.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from pdserve.engine.models.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh", "gelu"]
Gating = Activation | Literal["swiglu_oai"]  # of a gate and the gated values; the last is gpt-oss's


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a part loads."""

    name: str  # Hugging Face's name
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Heads:
    """How a row is divided: `q` heads of queries, then `kv` of keys and `kv` of values."""

    q: int
    kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class Part:
    """One operation of a layer."""

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the tensors of all fields, in the order in which they are loaded."""
        values = (getattr(self, item.name) for item in fields(self))
        return tuple(tensor for value in values for tensor in _tensors(value))


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
    """(x - mean) / deviation over the last dim, times weight, plus bias."""

    weight: TensorSpec
    bias: TensorSpec | None
    eps: float


@dataclass(frozen=True, slots=True)
class Linear(Part):
    """Products with several matrices over the same x, side by side; biases for all or for none."""

    weights: tuple[TensorSpec, ...]
    biases: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class SliceNorm(Part):
    """RMS norm over the values of x from `begin`, as many as the weight has."""

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
    """RMS norm over each head of q and of k, or over all heads of one as a row, times weight +
    offset. The length of a weight is the length of one normed slice."""

    heads: Heads
    q: TensorSpec
    k: TensorSpec
    offset: float
    eps: float


@dataclass(frozen=True, slots=True)
class Rope(Part):
    """Rotates the heads of q and k by their position; the first begins at value `begin` of x."""

    heads: Heads
    config: RopeConfig
    begin: int = 0


@dataclass(frozen=True, slots=True)
class Attention(Part):
    """Stores k and v, and attends over the keys in the cache; x becomes [tokens, q heads * dim].

    A sink is a score in the softmax of a query head that belongs to no key. Latent attention stores
    keys only, whose last values are the value, and x becomes [tokens, q heads * latent]
    (DeepSeek-V2, arXiv:2405.04434, 2.1, with the up-projections of keys and values outside).
    """

    heads: Heads
    scale: float
    soft_cap: float
    window: int
    sinks: TensorSpec | None = None  # [q heads]
    latent: int = 0  # number of a key's values that are its value; 0: separate values


@dataclass(frozen=True, slots=True)
class Gate(Part):
    """activation(first half of x) * second half."""

    activation: Activation


@dataclass(frozen=True, slots=True)
class Activate(Part):
    """activation(x)."""

    activation: Activation


@dataclass(frozen=True, slots=True)
class Scale(Part):
    """x times a number."""

    factor: float


@dataclass(frozen=True, slots=True)
class Hold(Part):
    """Keeps x for the next Add; x becomes the unchanged residual stream."""


@dataclass(frozen=True, slots=True)
class Add(Part):
    """Adds x to the residual stream, plus the held value if `held`; x is then the stream."""

    held: bool = False


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """Which experts a token goes to, by its router logits, and their weights in the sum.

    Scores are the softmax or the sigmoid of all logits. The experts with the `top_k` best sums of
    score and correction are chosen; ties go to the first. If experts are in groups, only those of
    the `kept_groups` best groups take part, and a group's quality is the sum of its `group_best`
    best sums. An expert's weight is its score: divided by the sum of the chosen experts' scores if
    `normalized`, times `scale`.
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
    """A gated MLP: gate and up, then down."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts(Part):
    """A mixture of experts: the weighted sum of the chosen experts' results, in the order of the
    experts, plus the shared expert's result, itself times the sigmoid of its gate if it has one.

    The router computes in float32, with its weights as they are held.
    """

    router: TensorSpec  # [experts, hidden]
    router_bias: TensorSpec | None  # [experts]
    correction: TensorSpec | None  # [experts], for the choice only
    shared_gate: TensorSpec | None  # [1, hidden]
    experts: tuple[Expert, ...]
    shared: Expert | None
    routing: ExpertRouting
    activation: Gating
