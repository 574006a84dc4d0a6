"""Seed-OSS: Llama with biases on q, k and v, and optionally on o and the feed-forward."""

from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import ModelConfig, ModelSpec
from pdserve.engine.models.hf_config import HfConfig, standard


def parse(hf: HfConfig) -> ModelConfig:
    return standard(
        {"head_dim": 128, **hf},
        qkv_bias=bool(hf.get("attention_bias", True)),
        o_bias=bool(hf.get("attention_out_bias", False)),
        ffn_bias=bool(hf.get("mlp_bias", False)),
    )


GGUF = GgufMapping(
    "seed_oss",
    tensors={"blk.{n}.post_attention_norm": "model.layers.{n}.post_attention_layernorm"},
)
SPEC = ModelSpec(("SeedOssForCausalLM",), parse, GGUF)
