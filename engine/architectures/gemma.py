"""Gemma 1 to 3: Llama with scaled embeddings, norms that multiply by 1 + weight, and a GELU gate.

Gemma 1: arXiv:2403.08295. Gemma 2 adds norms after attention and feed-forward, soft caps on scores
and logits, and a sliding window on every other layer (arXiv:2408.00118). Gemma 3 has q and k norms
in place of the caps, and five sliding-window layers per global layer, which has a separate rope
(arXiv:2503.19786). Of Gemma 3 with a vision tower (4B and larger), only the text part is served.
"""

from typing import Any

from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata, window_config
from pdserve.engine.models import (
    LayerConfig,
    ModelConfig,
    ModelSpec,
    NormPlacement,
    TextModel,
    UnsupportedModel,
    text_of,
)
from pdserve.engine.models.hf_config import (
    HfConfig,
    attention_biases,
    head_dim,
    integer,
    num_layers,
    plain_layers,
    positive,
    read_rope,
    sliding_window,
    soft_cap,
    standard,
    windowed,
    windows,
)

NORMS = NormPlacement(
    attn_in="input_layernorm",
    attn_out="post_attention_layernorm",
    ffn_in="pre_feedforward_layernorm",
    ffn_out="post_feedforward_layernorm",
)
GGUF_NORMS = {
    "blk.{n}.post_attention_norm": "model.layers.{n}.post_attention_layernorm",
    "blk.{n}.ffn_norm": "model.layers.{n}.pre_feedforward_layernorm",
    "blk.{n}.post_ffw_norm": "model.layers.{n}.post_feedforward_layernorm",
}


def gemma_defaults(hf: HfConfig) -> HfConfig:
    """Return the config with the fields that Gemma's config.json omits. Raises UnsupportedModel if
    its attention is not causal."""
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedModel(
            "config field use_bidirectional_attention: only causal attention is supported"
        )
    return {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", **hf}


def _standard(hf: HfConfig, **overrides: Any) -> ModelConfig:
    """Read the config fields that all Gemma models have in common; `overrides` are further fields
    of ModelConfig."""
    return standard(
        hf,
        norm_offset=1.0,
        embed_scale=integer(hf, "hidden_size") ** 0.5,
        tied_head=bool(hf.get("tie_word_embeddings", True)),
        **attention_biases(hf),
        **overrides,
    )


def parse_gemma(hf: HfConfig) -> ModelConfig:
    """Parse the config of Gemma 1: Llama with scaled embeddings, norms that multiply by 1 + weight,
    and a GELU gate (arXiv:2403.08295)."""
    # Releases state "gelu" as `hidden_act` but were trained with its tanh approximation.
    if not hf.get("hidden_activation") and hf.get("hidden_act") not in (None, "gelu"):
        hf = {**hf, "hidden_activation": hf["hidden_act"]}
    return _standard(gemma_defaults(hf))


GEMMA = ModelSpec(("GemmaForCausalLM",), parse_gemma, GgufMapping("gemma", norm_offset=1.0))


def parse_gemma2(hf: HfConfig) -> ModelConfig:
    """Parse the config of Gemma 2: norms before and after attention and feed-forward, soft caps on
    scores and logits, a sliding window on every other layer (arXiv:2408.00118)."""
    defaults = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    hf = {**defaults, **gemma_defaults(hf)}
    default = [n % 2 == 0 for n in range(num_layers(hf))]
    return _standard(
        hf,
        layers=plain_layers(hf, windows(hf, sliding_window(hf, 4096), default)),
        norms=NORMS,
        attn_scale=positive(hf, "query_pre_attn_scalar", 256.0) ** -0.5,
        attn_soft_cap=soft_cap(hf, "attn_logit_softcapping"),
        logit_soft_cap=soft_cap(hf, "final_logit_softcapping"),
    )


def gemma2_gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Return config.json's fields from Gemma 2's GGUF metadata. The metadata lacks the query scale,
    which differs in the 27B model, identified by its 46 layers."""
    size = metadata.get("gemma2.attention.key_length", 256)
    if metadata["gemma2.block_count"] == 46:
        size = metadata["gemma2.embedding_length"] // metadata["gemma2.attention.head_count"]
    return {
        "query_pre_attn_scalar": size,
        "sliding_window": metadata.get("gemma2.attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.get("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.get("gemma2.final_logit_softcapping", 30.0),
    }


GEMMA2_GGUF = GgufMapping("gemma2", tensors=GGUF_NORMS, config=gemma2_gguf_config, norm_offset=1.0)
GEMMA2 = ModelSpec(("Gemma2ForCausalLM",), parse_gemma2, GEMMA2_GGUF)


def parse_gemma3(hf: HfConfig) -> ModelConfig:
    """Parse the config of Gemma 3, text only: norms before and after attention and feed-forward, q
    and k norms, five sliding-window layers per global layer, which has a separate rope
    (arXiv:2503.19786)."""
    if hf.get("attn_logit_softcapping") is not None:  # transformers reads it and never applies it
        raise UnsupportedModel(
            "config field attn_logit_softcapping: Gemma 3 has no cap on attention scores"
        )
    hf = gemma_defaults(hf)
    return _standard(
        hf,
        layers=gemma3_layers(hf),
        norms=NORMS,
        qk_norm="head",
        attn_scale=positive(hf, "query_pre_attn_scalar", 256.0) ** -0.5,
        logit_soft_cap=soft_cap(hf, "final_logit_softcapping"),
    )


def gemma3_layers(hf: HfConfig) -> tuple[LayerConfig, ...]:
    """Return the settings of Gemma 3's layers. By default every sixth layer is global, which means
    without a sliding window; only global layers have rope scaling."""
    pattern = integer(hf, "sliding_window_pattern", integer(hf, "_sliding_window_pattern", 6))
    has_window = windowed(hf, [bool((n + 1) % pattern) for n in range(num_layers(hf))])
    size = head_dim(hf)
    global_layer = LayerConfig(read_rope(hf, size, "full_attention", default_theta=1e6))
    local_layer = LayerConfig(
        read_rope(hf, size, "sliding_attention", "rope_local_base_freq", scaled=False),
        sliding_window(hf, 4096),
    )
    return tuple(local_layer if has else global_layer for has in has_window)


def gemma3_gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Return config.json's fields from Gemma 3's GGUF metadata. The query scale differs in the 27B
    model, identified by its 62 layers."""
    size = metadata.get("gemma3.attention.key_length", 256)
    if metadata["gemma3.block_count"] == 62:
        size = metadata["gemma3.embedding_length"] // metadata["gemma3.attention.head_count"]
    config: dict[str, Any] = {
        "query_pre_attn_scalar": size,
        "rope_local_base_freq": metadata.get("gemma3.rope.freq_base_swa", 10_000.0),
        "sliding_window": None,
        "final_logit_softcapping": metadata.get("gemma3.final_logit_softcapping"),
    }
    return config | window_config(metadata)


GEMMA3_GGUF = GgufMapping("gemma3", tensors=GGUF_NORMS, config=gemma3_gguf_config, norm_offset=1.0)

GEMMA3 = ModelSpec(("Gemma3ForCausalLM",), parse_gemma3, GEMMA3_GGUF)


# Of the text model, where config.json omits a field.
GEMMA3_TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
GEMMA3_MULTIMODAL = text_of(
    "Gemma3ForConditionalGeneration", TextModel("gemma3_text", parse_gemma3, GEMMA3_TEXT_DEFAULTS)
)
