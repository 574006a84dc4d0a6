"""GLM 4.5 and 4.6: a mixture of experts after the first dense layers, rope in half of each head
(arXiv:2508.06471).
"""

from typing import Any

from pdserve.engine.checkpoints.gguf import GROUPED, GgufMapping, Metadata, expert_config
from pdserve.engine.models import MixtureOfExperts, ModelConfig, ModelSpec, is_mtp, stored_experts
from pdserve.engine.models.hf_config import (
    HfConfig,
    grouped_routing,
    integer,
    num_experts,
    standard,
    with_experts,
)


def parse(hf: HfConfig) -> ModelConfig:
    hf = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, **hf}
    config = standard(
        hf,
        qkv_bias=bool(hf.get("attention_bias", False)),
        qk_norm="head" if hf.get("use_qk_norm") else "",
    )
    size = integer(hf, "moe_intermediate_size")
    mixture = MixtureOfExperts(
        num_experts(hf),
        size,
        grouped_routing(hf),
        has_correction=True,
        shared_size=size * integer(hf, "n_shared_experts", 1, minimum=0),
    )
    first = integer(hf, "first_k_dense_replace", 1, minimum=0)
    return with_experts(config, mixture, range(first, config.num_layers))


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Return config.json's fields from GGUF metadata, with llama.cpp's defaults for missing
    ones."""
    defaults = {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 0}
    config = defaults | expert_config(metadata, *GROUPED, scores="sigmoid")
    config["routed_scaling_factor"] = config.get("routed_scaling_factor") or 1.0  # 0: none
    return config


GGUF = GgufMapping(
    "glm4moe",
    tensors={"blk.{n}.post_attention_norm": "model.layers.{n}.post_attention_layernorm"},
    config=gguf_config,
)
SPEC = ModelSpec(("Glm4MoeForCausalLM",), parse, GGUF, stored_experts, is_mtp)
