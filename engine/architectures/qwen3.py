"""Qwen 3, dense or with experts: RMS norms over the heads of q and k, no biases by default
(arXiv:2505.09388).
"""

from collections.abc import Sequence
from typing import Any

from pdserve.engine.architectures.qwen2 import upper_windows
from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata, expert_config
from pdserve.engine.models import (
    MixtureOfExperts,
    ModelConfig,
    ModelSpec,
    scorer_of,
    stored_experts,
)
from pdserve.engine.models.hf_config import (
    HfConfig,
    attention_biases,
    integer,
    num_experts,
    num_layers,
    plain_layers,
    routing,
    sliding_window,
    sparse_layers,
    standard,
    with_experts,
)


def parse_dense(hf: HfConfig) -> ModelConfig:
    """Parse the config of dense Qwen 3: RMS norms over the heads of q and k, no biases by default
    (arXiv:2505.09388)."""
    return with_windows(hf, upper_windows(hf))


def with_windows(hf: HfConfig, windows: Sequence[int]) -> ModelConfig:
    """Parse the config of Qwen 3 with the given attention windows, one for each layer."""
    size = integer(hf, "head_dim", 128)
    return standard(
        hf,
        head_dim=size,
        attn_scale=size**-0.5,
        qk_norm="head",
        **attention_biases(hf),
        layers=plain_layers({**hf, "head_dim": size}, windows),
    )


QWEN3 = ModelSpec(("Qwen3ForCausalLM",), parse_dense, GgufMapping("qwen3"))
SCORER = scorer_of("Qwen3ForSequenceClassification", QWEN3)


def parse_moe(hf: HfConfig) -> ModelConfig:
    """Parse the config of Qwen 3 with a mixture of experts (arXiv:2505.09388)."""
    mixture = MixtureOfExperts(
        num_experts(hf),
        integer(hf, "moe_intermediate_size"),
        routing(hf, normalized=bool(hf.get("norm_topk_prob", False))),
    )
    window = sliding_window(hf, 4096) if hf.get("use_sliding_window") else 0
    config = with_windows(hf, [window] * num_layers(hf))
    return with_experts(config, mixture, sparse_layers(hf))


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    # All releases normalize, but files do not state it.
    return {"norm_topk_prob": True, **expert_config(metadata, "expert_weights_norm")}


MOE_GGUF = GgufMapping("qwen3moe", config=gguf_config)
QWEN3_MOE = ModelSpec(("Qwen3MoeForCausalLM",), parse_moe, MOE_GGUF, stored_experts)
