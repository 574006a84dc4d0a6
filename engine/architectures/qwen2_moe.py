"""Qwen 1.5 and 2 with a mixture of experts and an always active expert (arXiv:2407.10671)."""

from typing import Any

from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata, expert_config
from pdserve.engine.models import MixtureOfExperts, ModelConfig, ModelSpec, stored_experts
from pdserve.engine.models.hf_config import (
    HfConfig,
    integer,
    num_experts,
    num_layers,
    plain_layers,
    routing,
    sliding_window,
    sparse_layers,
    windowed,
    with_experts,
)
from pdserve.engine.models.hf_config.standard import standard


def parse(hf: HfConfig) -> ModelConfig:
    window = sliding_window(hf, 4096) if hf.get("use_sliding_window") else 0
    last = integer(hf, "max_window_layers", 28, minimum=0)
    has_window = windowed(hf, [n % 2 == 0 and n < last for n in range(num_layers(hf))])
    config = standard(
        hf,
        layers=plain_layers(hf, [window if has else 0 for has in has_window]),
        qkv_bias=bool(hf.get("qkv_bias", True)),
    )
    mixture = MixtureOfExperts(
        num_experts(hf),
        integer(hf, "moe_intermediate_size"),
        routing(hf, normalized=bool(hf.get("norm_topk_prob", False))),
        shared_size=integer(hf, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return with_experts(config, mixture, sparse_layers(hf))


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    return expert_config(metadata, "expert_shared_feed_forward_length")


GGUF = GgufMapping("qwen2moe", config=gguf_config)
SPEC = ModelSpec(("Qwen2MoeForCausalLM",), parse, GGUF, stored_experts)
