"""Gemma 2: norms before and after each part, caps on scores and logits, a sliding window on every
other layer (arXiv:2408.00118).
"""

from typing import Any

from pdserve.engine.architectures.gemma import gemma_defaults
from pdserve.engine.architectures.gemma3 import GGUF_NORMS, NORMS
from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata
from pdserve.engine.models import ModelConfig, ModelSpec
from pdserve.engine.models.hf_config import (
    HfConfig,
    integer,
    num_layers,
    plain_layers,
    positive,
    sliding_window,
    soft_cap,
    windowed,
)
from pdserve.engine.models.hf_config.standard import standard


def parse(hf: HfConfig) -> ModelConfig:
    defaults = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    hf = {**defaults, **gemma_defaults(hf)}
    bias = bool(hf.get("attention_bias", False))
    has_window = windowed(hf, [n % 2 == 0 for n in range(num_layers(hf))])
    window = sliding_window(hf, 4096)
    return standard(
        hf,
        layers=plain_layers(hf, [window if has else 0 for has in has_window]),
        norms=NORMS,
        norm_offset=1.0,
        qkv_bias=bias,
        o_bias=bias,
        attn_scale=positive(hf, "query_pre_attn_scalar", 256.0) ** -0.5,
        attn_soft_cap=soft_cap(hf, "attn_logit_softcapping"),
        logit_soft_cap=soft_cap(hf, "final_logit_softcapping"),
        embed_scale=integer(hf, "hidden_size") ** 0.5,
        tied_head=bool(hf.get("tie_word_embeddings", True)),
    )


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Return config fields from GGUF metadata; the query scale is not in it, and 27B, identified by
    its 46 layers, has a different one."""
    size = metadata.get("gemma2.attention.key_length", 256)
    if metadata["gemma2.block_count"] == 46:
        size = metadata["gemma2.embedding_length"] // metadata["gemma2.attention.head_count"]
    return {
        "query_pre_attn_scalar": size,
        "sliding_window": metadata.get("gemma2.attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.get("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.get("gemma2.final_logit_softcapping", 30.0),
    }


GGUF = GgufMapping("gemma2", tensors=GGUF_NORMS, config=gguf_config, norm_offset=1.0)
SPEC = ModelSpec(("Gemma2ForCausalLM",), parse, GGUF)
