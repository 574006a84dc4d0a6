"""Phi 3, 3.5 and 4 (not the MoE models): Llama with q, k and v stored in one tensor, gate and up in
another (arXiv:2404.14219)."""

from typing import Any

from pdserve.engine.checkpoints import View, fused
from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata
from pdserve.engine.models import ModelConfig, ModelSpec, qkv_sizes
from pdserve.engine.models.hf_config import (
    HfConfig,
    num_layers,
    plain_layers,
    sliding_window,
    standard,
)


def parse(hf: HfConfig) -> ModelConfig:
    return standard(hf, layers=plain_layers(hf, [sliding_window(hf)] * num_layers(hf)))


def stored(config: ModelConfig) -> dict[str, View]:
    views: dict[str, View] = {}
    halves = {"gate_proj": config.ffn_size, "up_proj": config.ffn_size}
    for n in range(config.num_layers):
        views |= fused(f"model.layers.{n}.self_attn.", "qkv_proj", qkv_sizes(config))
        views |= fused(f"model.layers.{n}.mlp.", "gate_up_proj", halves)
    return views


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    return {"sliding_window": metadata.get("phi3.attention.sliding_window")}


GGUF = GgufMapping(
    "phi3",
    tensors={
        "blk.{n}.attn_qkv": "model.layers.{n}.self_attn.qkv_proj",
        "blk.{n}.ffn_up": "model.layers.{n}.mlp.gate_up_proj",
    },
    config=gguf_config,
)
SPEC = ModelSpec(("Phi3ForCausalLM",), parse, GGUF, stored)
