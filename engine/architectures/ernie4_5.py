"""ERNIE 4.5 (dense): Llama with rope over neighbouring dims, and one setting for all biases."""

from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import ModelConfig, ModelSpec, interleaved_rope
from pdserve.engine.models.hf_config import HfConfig, standard


def parse(hf: HfConfig) -> ModelConfig:
    bias = bool(hf.get("use_bias", hf.get("attention_bias", False)))  # the latter from GGUF
    return standard(
        {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, **hf},
        qkv_bias=bias,
        o_bias=bias,
        ffn_bias=bias,
        tied_head=bool(hf.get("tie_word_embeddings", True)),
    )


# The second name is that of the first releases.
NAMES = ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")
SPEC = ModelSpec(NAMES, parse, GgufMapping("ernie4_5"), interleaved_rope)
