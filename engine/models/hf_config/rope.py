"""Reads rope settings from config.json, in the nested, the flat and the older form.

Nested: `rope_parameters[layer_type]`; flat: `rope_parameters`; older: `rope_theta` with
`rope_scaling`. Unsupported scaling is refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdserve.engine.models.config import UnsupportedModel
from pdserve.engine.models.hf_config.fields import (
    MAX_SIZE,
    HfConfig,
    integer,
    positive,
    positives,
    table,
)
from pdserve.engine.models.rope import ROPE_KINDS, RopeConfig, for_context


def read_rope(
    hf: HfConfig,
    head_dim: int,
    layer_type: str = "",
    theta_key: str = "rope_theta",
    default_theta: float = 10_000.0,
    scaled: bool = True,
) -> RopeConfig:
    """Return the rope of the layers of one type. In the older form `theta_key` names their theta,
    and `rope_scaling` applies to them if `scaled`. Raises UnsupportedModel."""
    settings = _settings(hf, layer_type, theta_key, scaled)
    if settings.get("rope_type", settings.get("type")) == "su":  # the first name of longrope
        settings["rope_type"] = "longrope"
    rotary_share = min(positive(settings, "partial_rotary_factor", 1.0), 2.0)
    rotary_dim = int(round(head_dim * rotary_share, 6))  # 30 of 44 dims stay 30
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise UnsupportedModel(f"rope over {rotary_dim} of {head_dim} dims is not supported")
    theta = positive(settings, "rope_theta", default_theta)
    if theta <= 1:
        raise UnsupportedModel(f"config field rope_theta={theta}: expected a value above 1")
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ROPE_KINDS:
        supported = ", ".join(ROPE_KINDS)
        raise UnsupportedModel(f"rope scaling {kind!r} is not supported; supported: {supported}")
    if kind == "default":
        return RopeConfig(theta, rotary_dim)
    if kind == "factors":
        return RopeConfig(
            theta, rotary_dim, kind, factors=positives(settings, "factors", rotary_dim // 2)
        )
    context_len = integer(hf, "max_position_embeddings")
    if kind == "longrope":
        return _longrope(hf, settings, RopeConfig(theta, rotary_dim, kind))
    factor = positive(settings, "factor")
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, kind, factor)
    if kind == "dynamic":
        dynamic = RopeConfig(theta, rotary_dim, kind, factor, context_len)
        longest = factor * context_len
        if rotary_dim < 4 or factor < 1 or longest > MAX_SIZE:
            raise UnsupportedModel(
                f"dynamic rope of factor {factor} over {rotary_dim} dims is not supported"
            )
        if not math.isfinite(for_context(dynamic, int(longest)).theta):
            raise UnsupportedModel(f"dynamic rope overflows with theta {theta}")
        return dynamic
    original_len = integer(settings, "original_max_position_embeddings", context_len)
    if kind == "llama3":
        low, high = positive(settings, "low_freq_factor"), positive(settings, "high_freq_factor")
        if low >= high:
            raise UnsupportedModel(f"rope low_freq_factor {low} is not below {high}")
        return RopeConfig(
            theta,
            rotary_dim,
            kind,
            factor,
            original_len,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RopeConfig(
        theta,
        rotary_dim,
        kind,
        factor,
        original_len,
        beta_fast=positive(settings, "beta_fast", 32.0),
        beta_slow=positive(settings, "beta_slow", 1.0),
        truncate=bool(settings.get("truncate", True)),
        attention_factor=_yarn_attention_factor(settings, factor),
    )


def _longrope(hf: HfConfig, settings: HfConfig, rope: RopeConfig) -> RopeConfig:
    """Return longrope settings; if not given, the multiplier of cos and sin follows from the ratio
    of the contexts."""
    context_len = integer(hf, "max_position_embeddings")
    default_len = integer(hf, "original_max_position_embeddings", context_len)
    original_len = integer(settings, "original_max_position_embeddings", default_len, minimum=2)
    factor = positive(settings, "factor", context_len / original_len)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_len))
    return replace(
        rope,
        original_context_len=original_len,
        attention_factor=positive(settings, "attention_factor", scale),
        factors=positives(settings, "short_factor", rope.rotary_dim // 2),
        long_factors=positives(settings, "long_factor", rope.rotary_dim // 2),
    )


def _settings(hf: HfConfig, layer_type: str, theta_key: str, scaled: bool) -> dict[str, Any]:
    """Return the settings of one layer type in the flat form, whichever form the config has."""
    parameters = table(hf, "rope_parameters")
    if parameters:
        settings = dict(table(parameters, layer_type) or parameters)
    else:
        settings = dict(table(hf, "rope_scaling")) if scaled else {}
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UnsupportedModel(f"config field rope_parameters has no entry {layer_type!r}")
    settings.setdefault("rope_theta", hf.get(theta_key))
    settings.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor"))
    return settings


def scores_magnitude(hf: HfConfig) -> float:
    """Return yarn's factor of attention scores if the config states mscale_all_dim, else 1; cos and
    sin do not include it (DeepSeek)."""
    settings = _settings(hf, "", "rope_theta", scaled=True)
    kind = settings.get("rope_type") or settings.get("type")
    if kind != "yarn" or not settings.get("mscale_all_dim"):
        return 1.0
    return _magnitude(positive(settings, "mscale_all_dim"), positive(settings, "factor")) ** 2


def _magnitude(weight: float, factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_attention_factor(settings: HfConfig, factor: float) -> float:
    """Return the factor of cos and sin: given, or 0.1 ln(factor) + 1 (arXiv:2309.00071, 3.4)."""
    if settings.get("attention_factor") is not None:
        return positive(settings, "attention_factor")
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        mscale, mscale_all_dim = positive(settings, "mscale"), positive(settings, "mscale_all_dim")
        return _magnitude(mscale, factor) / _magnitude(mscale_all_dim, factor)
    return _magnitude(1.0, factor)
