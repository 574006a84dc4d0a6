"""config.json's terms of a mixture of experts, from GGUF metadata."""

from typing import Any

from pdserve.engine.checkpoints.gguf.mapping import Metadata
from pdserve.engine.checkpoints.source import CheckpointError

COMMON = ("expert_count", "expert_used_count", "expert_feed_forward_length")
# Of experts in groups behind dense layers, as DeepSeek V3 has them.
GROUPED = (
    "expert_shared_count",
    "expert_group_count",
    "expert_group_used_count",
    "expert_weights_scale",
    "expert_weights_norm",
    "leading_dense_block_count",
)
KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}
SCORES = {1: "softmax", 2: "sigmoid"}  # of expert_gating_func


def expert_config(metadata: Metadata, *further: str, scores: str = "softmax") -> dict[str, Any]:
    """Config entries of the COMMON keys and `further` ones, as far as they are there; what an
    architecture does not name is not understood. Raises CheckpointError if the file wants other
    scores than the architecture has."""
    arch = metadata["general.architecture"]
    given = metadata.get(f"{arch}.expert_gating_func", 0)  # 0: it does not say
    if given and SCORES.get(given) != scores:
        raise CheckpointError(f"GGUF key {arch}.expert_gating_func is {given}: not {scores}")
    keys = (key for key in (*COMMON, *further) if f"{arch}.{key}" in metadata)
    return {KEYS[key]: metadata[f"{arch}.{key}"] for key in keys}
