"""Hunyuan (dense): Llama with RMS norms over the heads of q and k after rope."""

from typing import Any

from pdserve.engine.checkpoints import View, renamed
from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import ModelConfig, ModelSpec
from pdserve.engine.models.hf_config import (
    HfConfig,
    attention_biases,
    head_dim,
    positive,
    standard,
    table,
)

MAX_ALPHA = 1e6
NAMES = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}


def with_alpha(hf: HfConfig) -> HfConfig:
    """Return the config with the rope that `alpha` states: NTK-aware scaling by a fixed factor,
    which releases call dynamic."""
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope: dict[str, Any] = {"rope_theta": hf.get("rope_theta"), **table(hf, key)}
    if "dynamic" not in (rope.get("rope_type"), rope.get("type")) or not rope.get("alpha"):
        return hf
    size = max(head_dim(hf), 4)
    growth = positive(rope, "alpha", maximum=MAX_ALPHA) ** (size / (size - 2))
    theta = positive(rope, "rope_theta", 10_000.0) * growth
    return {**hf, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def parse(hf: HfConfig) -> ModelConfig:
    return standard(
        {"rms_norm_eps": 1e-5, **with_alpha(hf)},
        qk_norm="rotated_head",
        **attention_biases(hf),
    )


def stored(config: ModelConfig) -> dict[str, View]:
    views: dict[str, View] = {}
    for n in range(config.num_layers):
        views |= renamed(f"model.layers.{n}.self_attn.", NAMES)
    return views


SPEC = ModelSpec(("HunYuanDenseV1ForCausalLM",), parse, GgufMapping("hunyuan-dense"), stored)
