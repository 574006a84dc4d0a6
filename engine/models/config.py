"""The configuration of a transformer: its sizes, and the settings in which
architectures differ.

Plain data, made from a config.json by `ModelSpec.parse` and immutable afterwards.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from pdserve.engine.kv import Kind, LayerGroup
from pdserve.engine.models.classifier import Classifier
from pdserve.engine.models.parts import Activation, Part
from pdserve.engine.models.positions import LearnedPositions
from pdserve.engine.models.rope import RopeConfig


class UnsupportedModel(ValueError):
    """Raised if a checkpoint's config requires an unsupported feature, or is malformed."""


class FeedForward(Protocol):
    """The interface of a layer's feed-forward, which supplies the list of its parts. A mixture of
    experts implements it.

    Implementations are frozen dataclasses: their fields are part of the model's configuration.
    """

    def parts(self, config: "ModelConfig", prefix: str) -> tuple[Part, ...]:
        """Return the parts that compute the feed-forward, [tokens, hidden] to [tokens, hidden]. The
        names of their tensors begin with `prefix`."""


class Latent(Protocol):
    """The interface of latent attention, which caches one vector per token; every head reads that
    vector as its key and its value.

    Implementations are frozen dataclasses: their fields are part of the model's configuration.
    """

    @property
    def value_dim(self) -> int:
        """Number of values in one head's attention result."""

    def parts(self, config: "ModelConfig", n: int) -> tuple[Part, ...]:
        """Return the parts of layer n's attention, which map the normed residual stream to the
        results of all heads."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The settings of one layer that may differ from layer to layer: rope, attention window and
    feed-forward."""

    rope: RopeConfig | None  # None: no position encoding
    # Number of keys that a token sees up to itself, in an encoder also from itself on; 0: all.
    window: int = 0
    feed_forward: FeedForward | None = None  # None: an MLP of ffn_size


@dataclass(frozen=True, slots=True)
class NormPlacement:
    """Where a layer has norms, before and after attention and feed-forward: the tensor name of each
    norm, None for no norm."""

    attn_in: str | None = None
    attn_out: str | None = None  # before the residual is added
    ffn_in: str | None = None
    ffn_out: str | None = None  # before the residual is added


@dataclass(frozen=True, slots=True)
class Encoder:
    """The settings of an encoder. Its attention sees later tokens, and its first layer begins with
    a norm of the embeddings, which replaces the residual stream."""

    post_norm: bool = False  # every norm replaces the residual stream


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of one model. Sizes are counts of elements; lengths are in tokens."""

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
    gated: bool = True  # down(activation(gate x) * up x), else down(activation(up x))
    parallel: bool = False  # feed-forward on the same stream as attention, both added at once
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    # RMS norm of q and k before rope: over each head, or over all heads of each as one row;
    # "rotated_head": over each head after rope; "head_layer": a layer norm of each head, before
    # rope, with a separate weight for each head.
    qk_norm: Literal["", "head", "row", "rotated_head", "head_layer"] = ""
    attn_scale: float = 1.0  # of the scores
    attn_soft_cap: float = 0.0  # cap * tanh(score / cap); 0: none
    sinks: bool = False  # one score per head that belongs to no key
    logit_soft_cap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # factor of what is added to the stream
    logit_scale: float = 1.0
    head_bias: bool = False
    tied_head: bool = False  # the head is the embedding table
    latent: Latent | None = None  # what is cached instead of heads of keys and values
    classifier: Classifier | None = None  # set: the model scores texts and generates nothing
    encoder: Encoder | None = None  # set: attention sees later tokens too, within one prompt
    positions: LearnedPositions | None = None  # added to the embeddings of tokens

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different ropes of all layers, of queries and of keys."""
        ropes = (layer.rope for layer in self.layers if layer.rope)
        return tuple(dict.fromkeys(one for rope in ropes for one in (rope, rope.of_keys())))

    def kv_groups(self, kv_dtype: str) -> tuple[LayerGroup, ...]:
        """Group the layers by attention window, one group of the KV cache for each window size;
        layers without a window come first."""
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
