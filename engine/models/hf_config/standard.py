"""Reads the config.json fields that most architectures share.

A malformed or unknown value raises UnsupportedModel that names the field.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pdserve.engine.models.config import LayerConfig, ModelConfig, UnsupportedModel
from pdserve.engine.models.hf_config.fields import HfConfig, integer, positive
from pdserve.engine.models.hf_config.rope import read_rope
from pdserve.engine.models.layer import PRE_NORMS
from pdserve.engine.models.parts import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_MAX_LAYERS = 10_000


def soft_cap(hf: HfConfig, key: str) -> float:
    """Return hf[key] > 0, or 0 if it is absent or null."""
    return positive(hf, key) if hf.get(key) is not None else 0.0


def activation(hf: HfConfig) -> Activation:
    """Return the activation of the gate, under either of its two names."""
    name = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise UnsupportedModel(f"activation {name!r} is not supported; supported: {supported}")
    return ACTIVATIONS[name]


def head_dim(hf: HfConfig) -> int:
    """Return the given head size, or hidden_size / num_attention_heads."""
    return integer(hf, "head_dim", integer(hf, "hidden_size") // integer(hf, "num_attention_heads"))


def num_layers(hf: HfConfig) -> int:
    return integer(hf, "num_hidden_layers", maximum=_MAX_LAYERS)


def windowed(hf: HfConfig, default: Sequence[bool]) -> Sequence[bool]:
    """Return whether each layer has a window: from `layer_types`, else `default`."""
    names = hf.get("layer_types")
    if names is None:
        return default
    kinds = ("full_attention", "sliding_attention")
    fits = isinstance(names, list | tuple) and len(names) == num_layers(hf)
    if not fits or not all(name in kinds for name in names):
        raise UnsupportedModel(f"config field layer_types={names!r}")
    return [name == "sliding_attention" for name in names]


def sliding_window(hf: HfConfig, default: int = 0) -> int:
    """Return `sliding_window` in tokens; 0 if null; `default` if absent."""
    return integer(hf, "sliding_window", 0, minimum=0) if "sliding_window" in hf else default


def plain_layers(hf: HfConfig, windows: Sequence[int]) -> tuple[LayerConfig, ...]:
    """Return layers that differ only in the window."""
    rope = read_rope(hf, head_dim(hf))
    return tuple(LayerConfig(rope, window) for window in windows)


def standard(hf: HfConfig, **overrides: Any) -> ModelConfig:
    """Read a Llama-like config; `overrides` are the fields in which an architecture differs."""
    heads = integer(hf, "num_attention_heads")
    kv_heads = integer(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} heads are not a multiple of {kv_heads} kv heads")
    fields: dict[str, Any] = {
        "architecture": str(hf["architectures"][0]),
        "vocab_size": integer(hf, "vocab_size"),
        "hidden_size": integer(hf, "hidden_size"),
        "ffn_size": integer(hf, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim(hf),
        "context_len": integer(hf, "max_position_embeddings"),
        "norms": PRE_NORMS,
        "norm_eps": positive(hf, "rms_norm_eps", 1e-6, maximum=1.0),
        "activation": activation(hf),
        "attn_scale": head_dim(hf) ** -0.5,
        "tied_head": bool(hf.get("tie_word_embeddings", False)),
    }
    if "layers" not in overrides:
        fields["layers"] = plain_layers(hf, [0] * num_layers(hf))
    config = ModelConfig(**(fields | overrides))
    ropes = [layer.rope for layer in config.layers if layer.rope]
    scale = max((rope.factor for rope in ropes if rope.kind == "dynamic"), default=1.0)
    return replace(config, context_len=int(config.context_len * scale))
