"""InternLM 3: Llama with separate settings for the biases of q, k and v and for all others."""

from pdserve.engine.models import ModelConfig, ModelSpec
from pdserve.engine.models.hf_config import HfConfig, standard


def parse(hf: HfConfig) -> ModelConfig:
    # Releases have the first name of each pair, transformers writes the second.
    other_bias = bool(hf.get("bias", hf.get("mlp_bias", False)))
    return standard(
        {"head_dim": 128, "rms_norm_eps": 1e-5, **hf},
        qkv_bias=bool(hf.get("qkv_bias", hf.get("attention_bias", False))),
        o_bias=other_bias,
        ffn_bias=other_bias,
    )


# GGUF files call it llama.
SPEC = ModelSpec(("InternLM3ForCausalLM",), parse)
