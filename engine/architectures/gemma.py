"""Gemma 1: Llama with scaled embeddings, norms of 1 + weight and a GELU gate (arXiv:2403.08295)."""

from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import ModelConfig, ModelSpec, UnsupportedModel
from pdserve.engine.models.hf_config import HfConfig, integer
from pdserve.engine.models.hf_config.standard import standard


def gemma_defaults(hf: HfConfig) -> HfConfig:
    """Return the config with the fields that Gemma's config.json omits. Raises UnsupportedModel for
    bidirectional attention."""
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention: only causal attention is supported")
    return {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", **hf}


def parse(hf: HfConfig) -> ModelConfig:
    # Releases state "gelu" as `hidden_act` but were trained with its tanh approximation.
    if not hf.get("hidden_activation") and hf.get("hidden_act") not in (None, "gelu"):
        hf = {**hf, "hidden_activation": hf["hidden_act"]}
    hf = gemma_defaults(hf)
    bias = bool(hf.get("attention_bias", False))
    return standard(
        hf,
        norm_offset=1.0,
        qkv_bias=bias,
        o_bias=bias,
        embed_scale=integer(hf, "hidden_size") ** 0.5,
        tied_head=bool(hf.get("tie_word_embeddings", True)),
    )


SPEC = ModelSpec(("GemmaForCausalLM",), parse, GgufMapping("gemma", norm_offset=1.0))
