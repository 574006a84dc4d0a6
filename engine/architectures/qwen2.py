"""Qwen 1.5, 2 and 2.5: Llama with biases on q, k and v, and an optional window on some layers.

The mixtures of experts also have one expert that is always active (arXiv:2407.10671).
"""

from collections.abc import Sequence
from typing import Any

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
    integer,
    num_experts,
    num_layers,
    plain_layers,
    routing,
    sliding_window,
    sparse_layers,
    standard,
    windows,
    with_experts,
)


def upper_windows(hf: HfConfig) -> Sequence[int]:
    """Return the attention window of each layer in tokens: 0 without `use_sliding_window`; with it,
    by default only the layers from `max_window_layers` on have a window."""
    count = num_layers(hf)
    if not hf.get("use_sliding_window", False):
        return [0] * count
    first = integer(hf, "max_window_layers", 28, minimum=0)
    return windows(hf, sliding_window(hf, 4096), [n >= first for n in range(count)])


def parse_dense(hf: HfConfig) -> ModelConfig:
    """Parse the config of dense Qwen 2 and 2.5: Llama with biases on q, k and v, and an optional
    window on the upper layers."""
    return standard(hf, qkv_bias=True, layers=plain_layers(hf, upper_windows(hf)))


QWEN2 = ModelSpec(("Qwen2ForCausalLM",), parse_dense, GgufMapping("qwen2"))
SCORER = scorer_of("Qwen2ForSequenceClassification", QWEN2)


def parse_moe(hf: HfConfig) -> ModelConfig:
    """Parse the config of Qwen 1.5 and 2 with a mixture of experts, plus one expert that is always
    active (arXiv:2407.10671)."""
    window = sliding_window(hf, 4096) if hf.get("use_sliding_window") else 0
    last = integer(hf, "max_window_layers", 28, minimum=0)
    default = [n % 2 == 0 and n < last for n in range(num_layers(hf))]
    config = standard(
        hf,
        layers=plain_layers(hf, windows(hf, window, default)),
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


MOE_GGUF = GgufMapping("qwen2moe", config=gguf_config)
QWEN2_MOE = ModelSpec(("Qwen2MoeForCausalLM",), parse_moe, MOE_GGUF, stored_experts)
