"""Reads the fields of a mixture of experts from config.json. A malformed field raises
UnsupportedModel."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from pdserve.engine.models.config import ModelConfig, UnsupportedModel
from pdserve.engine.models.experts import MixtureOfExperts
from pdserve.engine.models.hf_config.fields import HfConfig, integer, positive
from pdserve.engine.models.hf_config.standard import num_layers
from pdserve.engine.models.parts import ExpertRouting

_NAMES = ("num_local_experts", "num_experts", "n_routed_experts")
_MAX_EXPERTS = 4096
_MAX_MATRICES = 1 << 17  # of all layers together; MiniMax M2 has 15,872 experts
_MAX_SCALE = 1e6


def num_experts(hf: HfConfig) -> int:
    """Return the number of experts, from the first of its names that the config has."""
    name = next((name for name in _NAMES if hf.get(name) is not None), _NAMES[0])
    return integer(hf, name, maximum=_MAX_EXPERTS)


def routing(hf: HfConfig, **fields: Any) -> ExpertRouting:
    """Return a routing to `num_experts_per_tok` experts; `fields` are further fields."""
    return ExpertRouting(integer(hf, "num_experts_per_tok", maximum=num_experts(hf)), **fields)


def grouped_routing(
    hf: HfConfig, scores: Literal["softmax", "sigmoid"] = "sigmoid", group_best: int = 2
) -> ExpertRouting:
    """Return DeepSeek V3's routing: groups by the sum of their two best experts (arXiv:2412.19437,
    2.1.2)."""
    count = num_experts(hf)
    groups = integer(hf, "n_group", 1)
    kept_groups = integer(hf, "topk_group", 1, maximum=groups)
    expert_routing = routing(
        hf,
        scores=scores,
        normalized=bool(hf.get("norm_topk_prob", True)),
        scale=positive(hf, "routed_scaling_factor", 1.0, maximum=_MAX_SCALE),
        groups=groups,
        kept_groups=kept_groups,
        group_best=group_best if groups > 1 else 1,
    )
    if count % groups or count // groups < expert_routing.group_best:
        raise UnsupportedModel(f"{count} experts cannot be split into {groups} groups")
    if expert_routing.top_k > kept_groups * (count // groups):
        raise UnsupportedModel(
            f"{expert_routing.top_k} experts per token need more than {kept_groups} groups "
            f"of {count // groups}"
        )
    return expert_routing


def sparse_layers(hf: HfConfig) -> Collection[int]:
    """Return the layers with experts: every `decoder_sparse_step`th except `mlp_only_layers`."""
    step = integer(hf, "decoder_sparse_step", 1)
    dense = hf.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple):
        raise UnsupportedModel(f"config field mlp_only_layers={dense!r}: expected a list")
    return [n for n in range(num_layers(hf)) if (n + 1) % step == 0 and n not in dense]


def with_experts(
    config: ModelConfig, mixture: MixtureOfExperts, layers: Collection[int]
) -> ModelConfig:
    """Return the config with experts in `layers`."""
    sparse = set(layers)
    if len(sparse) * mixture.num_experts > _MAX_MATRICES:
        raise UnsupportedModel(
            f"{mixture.num_experts} experts in each of {len(sparse)} layers are too many"
        )
    return replace(
        config,
        layers=tuple(
            replace(layer, feed_forward=mixture) if n in sparse else layer
            for n, layer in enumerate(config.layers)
        ),
    )
