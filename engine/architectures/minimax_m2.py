"""MiniMax M2: a mixture of experts on every layer, norms over all of q and over all of k, rope in
part of each head."""

from typing import Any

from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata, expert_config
from pdserve.engine.models import MixtureOfExperts, ModelConfig, ModelSpec, is_mtp, stored_experts
from pdserve.engine.models.hf_config import (
    HfConfig,
    head_dim,
    integer,
    num_experts,
    routing,
    standard,
    with_experts,
)


def parse(hf: HfConfig) -> ModelConfig:
    hf = {"rope_theta": 5e6, **hf}
    if hf.get("rotary_dim") is not None:
        hf = {"partial_rotary_factor": integer(hf, "rotary_dim") / head_dim(hf), **hf}
    config = standard(hf, qk_norm="row")
    mixture = MixtureOfExperts(
        num_experts(hf),
        config.ffn_size,
        routing(hf, scores="sigmoid", normalized=True),
        has_correction=True,
    )
    return with_experts(config, mixture, range(config.num_layers))


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    return expert_config(metadata, scores="sigmoid")


GGUF = GgufMapping("minimax-m2", config=gguf_config)
SPEC = ModelSpec(("MiniMaxM2ForCausalLM",), parse, GGUF, stored_experts, is_mtp)
