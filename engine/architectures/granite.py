"""Granite 3 and 4 (dense): Llama with multipliers for embeddings, scores, residuals and logits."""

from typing import Any

from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata
from pdserve.engine.models import ModelConfig, ModelSpec
from pdserve.engine.models.hf_config import HfConfig, attention_biases, positive, standard


def parse(hf: HfConfig) -> ModelConfig:
    return standard(
        hf,
        **attention_biases(hf),
        ffn_bias=bool(hf.get("mlp_bias", False)),
        attn_scale=positive(hf, "attention_multiplier", 1.0),
        embed_scale=positive(hf, "embedding_multiplier", 1.0),
        residual_scale=positive(hf, "residual_multiplier", 1.0),
        logit_scale=1 / positive(hf, "logits_scaling", 1.0),
    )


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    keys = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    return {
        hf: metadata[f"granite.{key}"] for key, hf in keys.items() if f"granite.{key}" in metadata
    }


GGUF = GgufMapping("granite", config=gguf_config, permuted=True)
SPEC = ModelSpec(("GraniteForCausalLM",), parse, GGUF)
