"""GLM 4 of 2024 (GLM-4-9B): Llama with rope over neighbouring dims in half of each head, biases on
q, k and v, gate and up in one tensor (arXiv:2406.12793)."""

from pdserve.engine.checkpoints import View, fused
from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import ModelConfig, ModelSpec, interleaved_rope
from pdserve.engine.models.hf_config import HfConfig, standard


def parse(hf: HfConfig) -> ModelConfig:
    defaults = {"partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7}
    hf = {**defaults, **hf}
    return standard(hf, qkv_bias=bool(hf.get("attention_bias", True)))


def stored(config: ModelConfig) -> dict[str, View]:
    views = interleaved_rope(config)
    halves = {"gate_proj": config.ffn_size, "up_proj": config.ffn_size}
    for n in range(config.num_layers):
        views |= fused(f"model.layers.{n}.mlp.", "gate_up_proj", halves)
    return views


GGUF = GgufMapping("chatglm", tensors={"blk.{n}.ffn_up": "model.layers.{n}.mlp.gate_up_proj"})
SPEC = ModelSpec(("GlmForCausalLM",), parse, GGUF, stored)
