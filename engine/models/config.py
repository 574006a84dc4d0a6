"""What a decoder-only transformer is: its geometry and the seams in which architectures differ.

Pure data, no torch. Made from a config.json by `ModelSpec.parse`; nothing changes it afterwards.
"""

from dataclasses import dataclass
from typing import Literal

from pdserve.engine.kv.spec import LayerGroup

Activation = Literal["silu", "gelu_tanh", "gelu"]
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "factors")


class UnsupportedModel(ValueError):
    """The checkpoint's config asks for something that no code here does, or is malformed."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of a layer (RoFormer, arXiv:2104.09864) and its scaling.

    Kinds: `default`; `linear` (positions / factor); `llama3` (Llama 3.1's smoothed factor);
    `yarn` (arXiv:2309.00071); `factors` (a divisor per frequency, as GGUF's rope_freqs.weight).
    """

    theta: float
    rotary_dim: int  # the first dims of a head that rotate; even
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    original_context_len: int = 0  # tokens before scaling: llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dims as borders of the ramp
    attention_factor: float = 1.0  # multiplies cos and sin
    factors: tuple[float, ...] = ()  # rotary_dim / 2 divisors


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    rope: RopeConfig
    window: int = 0  # keys a token sees, itself included; 0: all


@dataclass(frozen=True, slots=True)
class NormPlacement:
    """Tensor names of a layer's norms; None: no norm at that place."""

    attn_in: str | None = "input_layernorm"
    attn_out: str | None = None  # before the residual is added
    ffn_in: str | None = "post_attention_layernorm"
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
    head_dim: int
    context_len: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    norm_offset: float = 0.0  # added to norm weights at load: 1 for Gemma
    norms: NormPlacement = NormPlacement()
    activation: Activation = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k, before rope
    attn_scale: float = 1.0  # of the scores
    attn_soft_cap: float = 0.0  # cap * tanh(score / cap); 0: none
    logit_soft_cap: float = 0.0
    embed_scale: float = 1.0
    tied_head: bool = False  # the head is the embedding table

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def kv_groups(self, kv_dtype: str) -> tuple[LayerGroup, ...]:
        """Layers by what they keep: those that see everything first, then one group a window."""
        windows = sorted({layer.window for layer in self.layers})
        return tuple(
            LayerGroup(
                layers=tuple(n for n, layer in enumerate(self.layers) if layer.window == window),
                kind="window" if window else "full",
                window=window,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                dtype=kv_dtype,
                head_start=0,
                head_end=self.num_kv_heads,
            )
            for window in windows
        )
