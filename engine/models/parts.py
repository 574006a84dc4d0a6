"""The kinds of parts that a layer is made of: plain data that every backend computes.

A layer has the residual stream and one value x, both [tokens, hidden] at its start, where x is the
stream. Its parts change x one after the other; `Add` adds x to the stream and goes on with the sum.
A kind that is added elsewhere is a subclass of `Part` and a class that computes it
(engine/models/layers).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from pdserve.engine.models.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a part asks for."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Heads:
    """How queries, keys and values share a row: `q` heads, then `kv` of keys, `kv` of values."""

    q: int
    kv: int
    dim: int


class Part(ABC):
    """One operation of a layer."""

    @abstractmethod
    def tensors(self) -> tuple[TensorSpec, ...]:
        """What it needs, in the order in which it is asked for."""


@dataclass(frozen=True, slots=True)
class Norm(Part):
    """RMS norm over the last dim, times weight + offset."""

    weight: TensorSpec
    offset: float
    eps: float

    def tensors(self) -> tuple[TensorSpec, ...]:
        return (self.weight,)


@dataclass(frozen=True, slots=True)
class LayerNorm(Part):
    """(x - mean) / deviation over the last dim, times weight, plus bias."""

    weight: TensorSpec
    bias: TensorSpec | None
    eps: float

    def tensors(self) -> tuple[TensorSpec, ...]:
        return (self.weight, self.bias) if self.bias else (self.weight,)


@dataclass(frozen=True, slots=True)
class Linear(Part):
    """Products with several matrices over the same x, side by side; biases for all or for none."""

    weights: tuple[TensorSpec, ...]
    biases: tuple[TensorSpec, ...] = ()

    def tensors(self) -> tuple[TensorSpec, ...]:
        return (*self.weights, *self.biases)


@dataclass(frozen=True, slots=True)
class HeadNorm(Part):
    """RMS norm over each head of q and of k, or over all heads of one as a row: the weights are as
    long as what has a norm of its own. Times weight + offset."""

    heads: Heads
    q: TensorSpec
    k: TensorSpec
    offset: float
    eps: float

    def tensors(self) -> tuple[TensorSpec, ...]:
        return (self.q, self.k)


@dataclass(frozen=True, slots=True)
class Rope(Part):
    """Rotates the heads of q and k by their position."""

    heads: Heads
    config: RopeConfig

    def tensors(self) -> tuple[TensorSpec, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Attention(Part):
    """Stores k and v, and attends over the keys in the cache: [tokens, q heads * dim]."""

    heads: Heads
    scale: float
    soft_cap: float
    window: int

    def tensors(self) -> tuple[TensorSpec, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Gate(Part):
    """activation(first half of x) * second half."""

    activation: Activation

    def tensors(self) -> tuple[TensorSpec, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Activate(Part):
    """activation(x)."""

    activation: Activation

    def tensors(self) -> tuple[TensorSpec, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Scale(Part):
    """x times a number."""

    factor: float

    def tensors(self) -> tuple[TensorSpec, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Hold(Part):
    """Keeps x for the next Add; x is then the residual stream again, as it was."""

    def tensors(self) -> tuple[TensorSpec, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Add(Part):
    """Adds x to the residual stream, and what is held; x is then the stream."""

    held: bool = False

    def tensors(self) -> tuple[TensorSpec, ...]:
        return ()
