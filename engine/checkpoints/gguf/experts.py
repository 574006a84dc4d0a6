"""Builds the config.json entries of a mixture of experts from GGUF metadata."""

from typing import Any

from pdserve.engine.checkpoints.gguf.mapping import Metadata
from pdserve.engine.checkpoints.source import CheckpointError

COMMON = ("expert_count", "expert_used_count", "expert_feed_forward_length")
# Keys of grouped experts after dense layers (DeepSeek V3).
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
SCORES = {1: "softmax", 2: "sigmoid"}  # values of expert_gating_func


def expert_config(metadata: Metadata, *extra_keys: str, scores: str = "softmax") -> dict[str, Any]:
    """Return the config entries of the COMMON and the `extra_keys` that exist. Other keys stay
    unread, so that the checkpoint rejects them. Raises CheckpointError if the file needs other
    scores than `scores`."""
    arch = metadata["general.architecture"]
    gating = metadata.get(f"{arch}.expert_gating_func", 0)  # 0: not specified
    if gating and SCORES.get(gating) != scores:
        raise CheckpointError(f"GGUF key {arch}.expert_gating_func is {gating}: expected {scores}")
    keys = (key for key in (*COMMON, *extra_keys) if f"{arch}.{key}" in metadata)
    return {KEYS[key]: metadata[f"{arch}.{key}"] for key in keys}
