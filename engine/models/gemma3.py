"""Gemma 3, text: norms before and after each part, q/k norms, five window layers to one global
layer with a rope of its own (arXiv:2503.19786).
"""

from pdserve.engine.models.config import LayerConfig, ModelConfig, NormPlacement, UnsupportedModel
from pdserve.engine.models.hf import (
    HfConfig,
    head_dim,
    integer,
    num_layers,
    positive,
    sliding_window,
    soft_cap,
    standard,
    windowed,
)
from pdserve.engine.models.hf_rope import read_rope
from pdserve.engine.models.spec import ModelSpec, register

NORMS = NormPlacement(
    attn_out="post_attention_layernorm",
    ffn_in="pre_feedforward_layernorm",
    ffn_out="post_feedforward_layernorm",
)


def parse(hf: HfConfig) -> ModelConfig:
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention: only causal attention is supported")
    hf = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", **hf}
    bias = bool(hf.get("attention_bias", False))
    return standard(
        hf,
        layers=layers(hf),
        norms=NORMS,
        norm_offset=1.0,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        attn_scale=positive(hf, "query_pre_attn_scalar", 256.0) ** -0.5,
        logit_soft_cap=soft_cap(hf, "final_logit_softcapping"),
        embed_scale=integer(hf, "hidden_size") ** 0.5,
        tied_head=bool(hf.get("tie_word_embeddings", True)),
    )


def layers(hf: HfConfig) -> tuple[LayerConfig, ...]:
    """Every sixth layer is global; only those have rope scaling."""
    pattern = integer(hf, "sliding_window_pattern", integer(hf, "_sliding_window_pattern", 6))
    has_window = windowed(hf, [bool((n + 1) % pattern) for n in range(num_layers(hf))])
    size = head_dim(hf)
    whole = LayerConfig(read_rope(hf, size, "full_attention", default_theta=1e6))
    local = LayerConfig(
        read_rope(hf, size, "sliding_attention", "rope_local_base_freq", scaled=False),
        sliding_window(hf, 4096),
    )
    return tuple(local if has else whole for has in has_window)


register(ModelSpec(("Gemma3ForCausalLM",), parse))
