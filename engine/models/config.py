"""What a decoder-only transformer is: its geometry and the seams in which architectures differ.

Plain data. Made from a config.json by `ModelSpec.parse`; nothing changes it afterwards.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from pdserve.engine.kv.spec import Kind, LayerGroup
from pdserve.engine.models.parts import Activation, Part
from pdserve.engine.models.rope import RopeConfig


class UnsupportedModel(ValueError):
    """The checkpoint's config asks for something that no code here does, or is malformed."""


class FeedForward(Protocol):
    """The feed-forward of a layer as a list of parts: what a mixture of experts replaces.

    It is a frozen dataclass: its fields are part of the model's configuration.
    """

    def parts(self, config: "ModelConfig", prefix: str) -> tuple[Part, ...]:
        """From [tokens, hidden] to the same; tensor names begin with `prefix`."""


class Latent(Protocol):
    """Attention over one vector of a token, which every head reads as its key and its value.

    It is a frozen dataclass, as a FeedForward is.
    """

    @property
    def value_dim(self) -> int:
        """Values of a head's result."""

    def parts(self, config: "ModelConfig", n: int) -> tuple[Part, ...]:
        """Of layer n, from the normed stream to the results of all heads, side by side."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    rope: RopeConfig | None  # None: nothing says where a token stands
    window: int = 0  # keys a token sees, itself included; 0: all
    feed_forward: FeedForward | None = None  # None: an MLP of ffn_size


@dataclass(frozen=True, slots=True)
class NormPlacement:
    """Tensor names of a layer's norms; None: no norm at that place."""

    attn_in: str | None = None
    attn_out: str | None = None  # before the residual is added
    ffn_in: str | None = None
    ffn_out: str | None = None  # before the residual is added


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model. Sizes are counts of elements; lengths are in tokens."""

    architecture: str  # Hugging Face class name
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of a key
    context_len: int
    layers: tuple[LayerConfig, ...]
    norms: NormPlacement
    norm_eps: float
    norm_kind: Literal["rms", "layer"] = "rms"  # of the stream and of branches
    norm_bias: bool = False  # of layer norms
    norm_offset: float = 0.0  # added to RMS norm weights at load: 1 for Gemma
    activation: Activation = "silu"
    gated: bool = True  # down(activation(gate x) * up x), or down(activation(up x))
    parallel: bool = False  # feed-forward on the stream that attention saw, both added at once
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    # RMS norm of q and k before rope: over each head, or over all heads of each as one row.
    qk_norm: Literal["", "head", "row"] = ""
    attn_scale: float = 1.0  # of the scores
    attn_soft_cap: float = 0.0  # cap * tanh(score / cap); 0: none
    sinks: bool = False  # a score of each head that stands for no key
    logit_soft_cap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what is added to the stream
    logit_scale: float = 1.0
    head_bias: bool = False
    tied_head: bool = False  # the head is the embedding table
    latent: Latent | None = None  # what is cached, in place of heads of keys and values

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def kv_groups(self, kv_dtype: str) -> tuple[LayerGroup, ...]:
        """Layers by what they keep: those that see everything first, then one group a window."""
        full: Kind = "latent" if self.latent else "full"
        windows = sorted({layer.window for layer in self.layers})
        return tuple(
            LayerGroup(
                layers=tuple(n for n, layer in enumerate(self.layers) if layer.window == window),
                kind="window" if window else full,
                window=window,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                dtype=kv_dtype,
                head_start=0,
                head_end=self.num_kv_heads,
            )
            for window in windows
        )
