"""Gemma 3, text only: norms before and after each part, q and k norms, five sliding-window layers
per global layer, which has a separate rope (arXiv:2503.19786).
"""

from collections.abc import Sequence
from typing import Any

from pdserve.engine.architectures.gemma import gemma_defaults
from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata
from pdserve.engine.models import (
    LayerConfig,
    ModelConfig,
    ModelSpec,
    NormPlacement,
    UnsupportedModel,
)
from pdserve.engine.models.hf_config import (
    HfConfig,
    head_dim,
    integer,
    num_layers,
    positive,
    read_rope,
    sliding_window,
    soft_cap,
    windowed,
)
from pdserve.engine.models.hf_config.standard import standard

NORMS = NormPlacement(
    attn_in="input_layernorm",
    attn_out="post_attention_layernorm",
    ffn_in="pre_feedforward_layernorm",
    ffn_out="post_feedforward_layernorm",
)


def parse(hf: HfConfig) -> ModelConfig:
    if hf.get("attn_logit_softcapping") is not None:  # transformers reads it and never applies it
        raise UnsupportedModel("attn_logit_softcapping: Gemma 3 has no cap on attention scores")
    hf = gemma_defaults(hf)
    bias = bool(hf.get("attention_bias", False))
    return standard(
        hf,
        layers=layers(hf),
        norms=NORMS,
        norm_offset=1.0,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        attn_scale=positive(hf, "query_pre_attn_scalar", 256.0) ** -0.5,
        logit_soft_cap=soft_cap(hf, "final_logit_softcapping"),
        embed_scale=integer(hf, "hidden_size") ** 0.5,
        tied_head=bool(hf.get("tie_word_embeddings", True)),
    )


def layers(hf: HfConfig) -> tuple[LayerConfig, ...]:
    """Return the layers: every sixth is global, and only those have rope scaling."""
    pattern = integer(hf, "sliding_window_pattern", integer(hf, "_sliding_window_pattern", 6))
    has_window = windowed(hf, [bool((n + 1) % pattern) for n in range(num_layers(hf))])
    size = head_dim(hf)
    global_layer = LayerConfig(read_rope(hf, size, "full_attention", default_theta=1e6))
    local_layer = LayerConfig(
        read_rope(hf, size, "sliding_attention", "rope_local_base_freq", scaled=False),
        sliding_window(hf, 4096),
    )
    return tuple(local_layer if has else global_layer for has in has_window)


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Return config fields from GGUF metadata, which names some differently and omits others (27B
    is identified by its 62 layers)."""
    size = metadata.get("gemma3.attention.key_length", 256)
    if metadata["gemma3.block_count"] == 62:
        size = metadata["gemma3.embedding_length"] // metadata["gemma3.attention.head_count"]
    config: dict[str, Any] = {
        "query_pre_attn_scalar": size,
        "rope_local_base_freq": metadata.get("gemma3.rope.freq_base_swa", 10_000.0),
        "sliding_window": metadata.get("gemma3.attention.sliding_window"),
        "final_logit_softcapping": metadata.get("gemma3.final_logit_softcapping"),
    }
    pattern = metadata.get("gemma3.attention.sliding_window_pattern", 6)
    if isinstance(pattern, Sequence):
        config["layer_types"] = [f"{'sliding' if has else 'full'}_attention" for has in pattern]
    else:
        config["sliding_window_pattern"] = pattern
    return config


GGUF_NORMS = {
    "blk.{n}.post_attention_norm": "model.layers.{n}.post_attention_layernorm",
    "blk.{n}.ffn_norm": "model.layers.{n}.pre_feedforward_layernorm",
    "blk.{n}.post_ffw_norm": "model.layers.{n}.post_feedforward_layernorm",
}
GGUF = GgufMapping("gemma3", tensors=GGUF_NORMS, config=gguf_config, norm_offset=1.0)

SPEC = ModelSpec(("Gemma3ForCausalLM",), parse, GGUF)
