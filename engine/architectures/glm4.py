"""GLM 4 of 2025 (GLM-4-0414): norms before and after attention and feed-forward, rope over
neighbouring dims in half of each head, gate and up in one tensor."""

from pdserve.engine.checkpoints import View, fused
from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import ModelConfig, ModelSpec, NormPlacement, interleaved_rope
from pdserve.engine.models.hf_config import HfConfig, standard

NORMS = NormPlacement(
    attn_in="input_layernorm",
    attn_out="post_self_attn_layernorm",
    ffn_in="post_attention_layernorm",
    ffn_out="post_mlp_layernorm",
)


def parse(hf: HfConfig) -> ModelConfig:
    hf = {"partial_rotary_factor": 0.5, "head_dim": 128, **hf}
    return standard(hf, norms=NORMS, qkv_bias=bool(hf.get("attention_bias", True)))


def stored(config: ModelConfig) -> dict[str, View]:
    views = interleaved_rope(config)
    halves = {"gate_proj": config.ffn_size, "up_proj": config.ffn_size}
    for n in range(config.num_layers):
        views |= fused(f"model.layers.{n}.mlp.", "gate_up_proj", halves)
    return views


GGUF = GgufMapping(
    "glm4",
    tensors={
        "blk.{n}.post_attention_norm": "model.layers.{n}.post_self_attn_layernorm",
        "blk.{n}.ffn_norm": "model.layers.{n}.post_attention_layernorm",
        "blk.{n}.ffn_up": "model.layers.{n}.mlp.gate_up_proj",
        "blk.{n}.post_ffw_norm": "model.layers.{n}.post_mlp_layernorm",
    },
)
SPEC = ModelSpec(("Glm4ForCausalLM",), parse, GGUF, stored)
