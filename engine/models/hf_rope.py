"""Reading of rope settings from config.json, in the nested, the flat and the older form.

Nested: `rope_parameters[layer_type]`; flat: `rope_parameters`; older: `rope_theta` with
`rope_scaling`. What scaling we do not compute is refused by name.
"""

import math
from collections.abc import Mapping
from typing import Any

from pdserve.engine.models.config import ROPE_KINDS, RopeConfig, UnsupportedModel


def read_rope(
    hf: Mapping[str, Any],
    head_dim: int,
    layer_type: str = "",
    theta_key: str = "rope_theta",
    default_theta: float = 10_000.0,
    scaled: bool = True,
) -> RopeConfig:
    """Rope of the layers of one type; in the older form `theta_key` names their theta, and
    `rope_scaling` holds for them if `scaled`. Raises UnsupportedModel.
    """
    given = _settings(hf, layer_type, theta_key, scaled)
    rotary_dim = int(head_dim * _positive(given, "partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise UnsupportedModel(f"rope over {rotary_dim} of {head_dim} dims")
    theta = _positive(given, "rope_theta", default_theta)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise UnsupportedModel(f"rope scaling {kind!r} is not supported; known: {known}")
    if kind == "default":
        return RopeConfig(theta, rotary_dim)
    if kind == "factors":
        return RopeConfig(theta, rotary_dim, kind, factors=_factors(given, rotary_dim))
    factor = _positive(given, "factor")
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, kind, factor)
    original = given.get("original_max_position_embeddings") or hf.get("max_position_embeddings")
    original_len = int(_positive({"original_max_position_embeddings": original}))
    if kind == "llama3":
        low, high = _positive(given, "low_freq_factor"), _positive(given, "high_freq_factor")
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
        beta_fast=_positive(given, "beta_fast", 32.0),
        beta_slow=_positive(given, "beta_slow", 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_yarn_attention_factor(given, factor),
    )


def _settings(
    hf: Mapping[str, Any], layer_type: str, theta_key: str, scaled: bool
) -> dict[str, Any]:
    """The settings of one layer type in the flat form, whichever form the config has."""
    table = hf.get("rope_parameters")
    if table is None:
        given = dict(hf.get("rope_scaling") or {}) if scaled else {}
        given.setdefault("rope_theta", hf.get(theta_key))
    else:
        given = dict(table.get(layer_type) or table)
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModel(f"config field rope_parameters has no entry {layer_type!r}")
    given.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor"))
    return given


def _positive(given: Mapping[str, Any], key: str = "", default: float | None = None) -> float:
    key = key or next(iter(given))
    value = given.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise UnsupportedModel(f"rope field {key}={value!r}: want a finite number > 0")
    return float(value)


def _factors(given: Mapping[str, Any], rotary_dim: int) -> tuple[float, ...]:
    factors = given.get("factors")
    if not isinstance(factors, list | tuple) or len(factors) != rotary_dim // 2:
        raise UnsupportedModel(f"rope factors: want {rotary_dim // 2} numbers")
    return tuple(_positive({"factors": value}) for value in factors)


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """The multiplier of cos and sin: given, or 0.1 ln(factor) + 1 (arXiv:2309.00071, 3.4)."""

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return _positive(given, "attention_factor")
    if given.get("mscale") and given.get("mscale_all_dim"):
        return magnitude(_positive(given, "mscale")) / magnitude(_positive(given, "mscale_all_dim"))
    return magnitude(1.0)
