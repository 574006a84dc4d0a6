"""Qwen 3 with a mixture of experts (arXiv:2505.09388)."""

from typing import Any

from pdserve.engine.architectures import qwen3
from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata, expert_config
from pdserve.engine.models import MixtureOfExperts, ModelConfig, ModelSpec, stored_experts
from pdserve.engine.models.hf_config import (
    HfConfig,
    integer,
    num_experts,
    num_layers,
    routing,
    sliding_window,
    sparse_layers,
    with_experts,
)


def parse(hf: HfConfig) -> ModelConfig:
    mixture = MixtureOfExperts(
        num_experts(hf),
        integer(hf, "moe_intermediate_size"),
        routing(hf, normalized=bool(hf.get("norm_topk_prob", False))),
    )
    window = sliding_window(hf, 4096) if hf.get("use_sliding_window") else 0
    config = qwen3.with_windows(hf, [window] * num_layers(hf))
    return with_experts(config, mixture, sparse_layers(hf))


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    # All releases normalize, but files do not state it.
    return {"norm_topk_prob": True, **expert_config(metadata, "expert_weights_norm")}


GGUF = GgufMapping("qwen3moe", config=gguf_config)
SPEC = ModelSpec(("Qwen3MoeForCausalLM",), parse, GGUF, stored_experts)
