"""Reads config.json: single fields with their bounds, rope, the fields that most architectures
share, and those of a mixture of experts.

A malformed or unsupported value raises UnsupportedModel, which names the field.

Rope settings have three forms. Nested: `rope_parameters[layer_type]`; flat: `rope_parameters`;
older: `rope_theta` with `rope_scaling`.
"""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pdserve.engine.models.config import LayerConfig, ModelConfig, UnsupportedModel
from pdserve.engine.models.experts import MixtureOfExperts
from pdserve.engine.models.layer import PRE_NORMS
from pdserve.engine.models.parts import Activation, ExpertRouting
from pdserve.engine.models.rope import ROPE_KINDS, RopeConfig, for_context

HfConfig = Mapping[str, Any]

_MAX_FLOAT = sys.float_info.max  # integers of JSON may be larger
MAX_SIZE = 1 << 30  # a bound on every count, so that products fit in 64 bits


def integer(
    hf: HfConfig, key: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE
) -> int:
    """Return the integer hf[key], or `default` if it is absent or null. Raises UnsupportedModel
    unless it is in [minimum, maximum]."""
    value = hf.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise UnsupportedModel(
            f"config field {key}={value!r}: expected an integer from {minimum} to {maximum}"
        )
    return value


def positive(
    hf: HfConfig, key: str, default: float | None = None, maximum: float = _MAX_FLOAT
) -> float:
    """Return the number hf[key], or `default` if it is absent or null. Raises UnsupportedModel
    unless it is above 0 and at most `maximum`."""
    value = hf.get(key)
    number = _positive(key, default if value is None else value)
    if number > maximum:
        raise UnsupportedModel(f"config field {key}={number!r}: expected at most {maximum:g}")
    return number


def positives(hf: HfConfig, key: str, count: int) -> tuple[float, ...]:
    """Return the list hf[key] of `count` finite numbers above 0. Raises UnsupportedModel for
    another value."""
    values = hf.get(key)
    if not isinstance(values, list | tuple) or len(values) != count:
        raise UnsupportedModel(f"config field {key}: expected {count} numbers > 0")
    return tuple(_positive(key, value) for value in values)


def table(hf: HfConfig, key: str) -> HfConfig:
    """Return the JSON object hf[key] as a mapping; empty if it is absent or null."""
    value = hf.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UnsupportedModel(f"config field {key}={value!r}: expected a table")
    return value


def _positive(key: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MAX_FLOAT:
        return float(value)
    raise UnsupportedModel(f"config field {key}={value!r}: expected a finite number > 0")


def read_rope(
    hf: HfConfig,
    head_dim: int,
    layer_type: str = "",
    theta_key: str = "rope_theta",
    default_theta: float = 10_000.0,
    scaled: bool = True,
) -> RopeConfig:
    """Return the rope settings of the layers of type `layer_type`. In the older form, `theta_key`
    names the field with the theta of these layers, and `rope_scaling` applies to them if `scaled`.
    Raises UnsupportedModel."""
    settings = _settings(hf, layer_type, theta_key, scaled)
    if settings.get("rope_type", settings.get("type")) == "su":  # the first name of longrope
        settings["rope_type"] = "longrope"
    rotary_share = min(positive(settings, "partial_rotary_factor", 1.0), 2.0)
    rotary_dim = int(round(head_dim * rotary_share, 6))  # 30 of 44 dims stay 30
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise UnsupportedModel(
            f"rope over {rotary_dim} of {head_dim} dims is not supported: "
            f"expected an even number from 2 to {head_dim}"
        )
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
                f"dynamic rope of factor {factor} over {rotary_dim} dims is not supported: "
                f"expected a factor of at least 1, 4 dims or more and at most {MAX_SIZE} tokens"
            )
        if not math.isfinite(for_context(dynamic, int(longest)).theta):
            raise UnsupportedModel(
                f"dynamic rope: theta {theta} becomes infinite for {longest:g} tokens"
            )
        return dynamic
    original_len = integer(settings, "original_max_position_embeddings", context_len)
    if kind == "llama3":
        low, high = positive(settings, "low_freq_factor"), positive(settings, "high_freq_factor")
        if low >= high:
            raise UnsupportedModel(
                f"config field low_freq_factor={low}: expected less than high_freq_factor={high}"
            )
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
    """Return longrope's settings. If the config gives no multiplier of cos and sin, it follows from
    the ratio of the extended context to the original one."""
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
    """Return the rope settings of one layer type as a flat mapping, whichever of the three forms
    the config has."""
    parameters = table(hf, "rope_parameters")
    if parameters:
        settings = dict(table(parameters, layer_type) or parameters)
    else:
        settings = dict(table(hf, "rope_scaling")) if scaled else {}
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UnsupportedModel(
            f"config field rope_parameters has no settings for layers of type {layer_type!r}"
        )
    settings.setdefault("rope_theta", hf.get(theta_key))
    settings.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor"))
    return settings


def scores_magnitude(hf: HfConfig) -> float:
    """Return the factor by which yarn multiplies attention scores, if the config states
    mscale_all_dim, else 1. The tables of cos and sin do not include this factor (DeepSeek)."""
    settings = _settings(hf, "", "rope_theta", scaled=True)
    kind = settings.get("rope_type") or settings.get("type")
    if kind != "yarn" or not settings.get("mscale_all_dim"):
        return 1.0
    return _magnitude(positive(settings, "mscale_all_dim"), positive(settings, "factor")) ** 2


def _magnitude(weight: float, factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_attention_factor(settings: HfConfig, factor: float) -> float:
    """Return yarn's factor of cos and sin: the one that the settings state, else 0.1 ln(factor) + 1
    (arXiv:2309.00071, 3.4)."""
    if settings.get("attention_factor") is not None:
        return positive(settings, "attention_factor")
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        mscale, mscale_all_dim = positive(settings, "mscale"), positive(settings, "mscale_all_dim")
        return _magnitude(mscale, factor) / _magnitude(mscale_all_dim, factor)
    return _magnitude(1.0, factor)


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu2": "relu2",
}
_MAX_LAYERS = 10_000


def soft_cap(hf: HfConfig, key: str) -> float:
    """Return the soft cap hf[key], above 0; 0 (no cap) if it is absent or null."""
    return positive(hf, key) if hf.get(key) is not None else 0.0


def activation(hf: HfConfig) -> Activation:
    """Return the feed-forward's activation function, from `hidden_activation` or `hidden_act`; silu
    if the config has neither."""
    name = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise UnsupportedModel(f"activation {name!r} is not supported; supported: {supported}")
    return ACTIVATIONS[name]


def head_dim(hf: HfConfig) -> int:
    """Return the size of an attention head: `head_dim`, or hidden_size / num_attention_heads if
    absent."""
    return integer(hf, "head_dim", integer(hf, "hidden_size") // integer(hf, "num_attention_heads"))


def num_layers(hf: HfConfig) -> int:
    return integer(hf, "num_hidden_layers", maximum=_MAX_LAYERS)


def windowed(hf: HfConfig, default: Sequence[bool]) -> Sequence[bool]:
    """Return for each layer whether it has a sliding window: from the field `layer_types`, or
    `default` if it is absent."""
    names = hf.get("layer_types")
    if names is None:
        return default
    kinds = ("full_attention", "sliding_attention")
    fits = isinstance(names, list | tuple) and len(names) == num_layers(hf)
    if not fits or not all(name in kinds for name in names):
        raise UnsupportedModel(
            f"config field layer_types={names!r}: expected {num_layers(hf)} values, "
            f"each {' or '.join(kinds)}"
        )
    return [name == "sliding_attention" for name in names]


def sliding_window(hf: HfConfig, default: int = 0) -> int:
    """Return the size of the sliding window, the field `sliding_window`, in tokens: 0 (no window)
    if null, `default` if absent."""
    return integer(hf, "sliding_window", 0, minimum=0) if "sliding_window" in hf else default


def windows(hf: HfConfig, window: int, default: Sequence[bool]) -> list[int]:
    """Return the window of each layer in tokens: `window` for the layers that have one (see
    `windowed`), 0 for the others."""
    return [window if has_window else 0 for has_window in windowed(hf, default)]


def attention_biases(hf: HfConfig) -> dict[str, bool]:
    """Return the fields of ModelConfig that the config's `attention_bias` sets, whether q, k, v and
    o have biases; False if it is absent."""
    return dict.fromkeys(("qkv_bias", "o_bias"), bool(hf.get("attention_bias", False)))


def layer_norms(hf: HfConfig, bias: bool = True) -> dict[str, Any]:
    """Return the fields of ModelConfig for layer norms in place of RMS norms; their epsilon is the
    field `layer_norm_eps`."""
    eps = positive(hf, "layer_norm_eps", 1e-5, maximum=1.0)
    return {"norm_kind": "layer", "norm_bias": bias, "norm_eps": eps}


def plain_layers(hf: HfConfig, windows: Sequence[int]) -> tuple[LayerConfig, ...]:
    """Return the settings of layers with equal rope that differ only in the window: one layer for
    each of `windows`."""
    rope = read_rope(hf, head_dim(hf))
    return tuple(LayerConfig(rope, window) for window in windows)


def standard(hf: HfConfig, **overrides: Any) -> ModelConfig:
    """Read a Llama-like config.json into a ModelConfig; `overrides` are the fields of ModelConfig
    in which an architecture differs."""
    heads = integer(hf, "num_attention_heads")
    kv_heads = integer(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} heads are not a multiple of {kv_heads} kv heads")
    fields: dict[str, Any] = {
        "architecture": str(hf["architectures"][0]),
        "vocab_size": integer(hf, "vocab_size"),
        "hidden_size": integer(hf, "hidden_size"),
        "ffn_size": integer(hf, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim(hf),
        "context_len": integer(hf, "max_position_embeddings"),
        "norms": PRE_NORMS,
        "norm_eps": positive(hf, "rms_norm_eps", 1e-6, maximum=1.0),
        "activation": activation(hf),
        "attn_scale": head_dim(hf) ** -0.5,
        "tied_head": bool(hf.get("tie_word_embeddings", False)),
    }
    if "layers" not in overrides:
        fields["layers"] = plain_layers(hf, [0] * num_layers(hf))
    config = ModelConfig(**(fields | overrides))
    ropes = [layer.rope for layer in config.layers if layer.rope]
    scale = max((rope.factor for rope in ropes if rope.kind == "dynamic"), default=1.0)
    return replace(config, context_len=int(config.context_len * scale))


_NAMES = ("num_local_experts", "num_experts", "n_routed_experts")
_MAX_EXPERTS = 4096
_MAX_MATRICES = 1 << 17  # of all layers together; MiniMax M2 has 15,872 experts
_MAX_SCALE = 1e6


def num_experts(hf: HfConfig) -> int:
    """Return the number of experts per layer, from the first of its possible field names that the
    config has."""
    name = next((name for name in _NAMES if hf.get(name) is not None), _NAMES[0])
    return integer(hf, name, maximum=_MAX_EXPERTS)


def routing(hf: HfConfig, **fields: Any) -> ExpertRouting:
    """Return a routing of each token to `num_experts_per_tok` experts; `fields` are further fields
    of ExpertRouting."""
    return ExpertRouting(integer(hf, "num_experts_per_tok", maximum=num_experts(hf)), **fields)


def grouped_routing(
    hf: HfConfig, scores: Literal["softmax", "sigmoid"] = "sigmoid", group_best: int = 2
) -> ExpertRouting:
    """Return DeepSeek V3's routing, which first chooses groups of experts and then experts in these
    groups (arXiv:2412.19437, 2.1.2)."""
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
        raise UnsupportedModel(
            f"{count} experts cannot be split into {groups} groups of equal size, "
            f"with at least {expert_routing.group_best} experts each"
        )
    if expert_routing.top_k > kept_groups * (count // groups):
        raise UnsupportedModel(
            f"{expert_routing.top_k} experts per token need more than {kept_groups} groups "
            f"of {count // groups} experts"
        )
    return expert_routing


def sparse_layers(hf: HfConfig) -> Collection[int]:
    """Return the indices of the layers that have experts: every `decoder_sparse_step`th layer
    except those in `mlp_only_layers`."""
    step = integer(hf, "decoder_sparse_step", 1)
    dense = hf.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple):
        raise UnsupportedModel(f"config field mlp_only_layers={dense!r}: expected a list")
    return [n for n in range(num_layers(hf)) if (n + 1) % step == 0 and n not in dense]


def with_experts(
    config: ModelConfig, mixture: MixtureOfExperts, layers: Collection[int]
) -> ModelConfig:
    """Return the config with `mixture` as the feed-forward of the given layers. Raises
    UnsupportedModel for too many experts."""
    sparse = set(layers)
    if len(sparse) * mixture.num_experts > _MAX_MATRICES:
        raise UnsupportedModel(
            f"{mixture.num_experts} experts in each of {len(sparse)} layers are too many: "
            f"expected at most {_MAX_MATRICES} experts in all layers"
        )
    return replace(
        config,
        layers=tuple(
            replace(layer, feed_forward=mixture) if n in sparse else layer
            for n, layer in enumerate(config.layers)
        ),
    )


def has_sigmoid(hf: HfConfig) -> bool:
    """Return whether the score of a model with a classification head is the sigmoid of its sum, as
    sentence-transformers' settings say; True if they are absent. Raises UnsupportedModel for a
    head with several labels or another activation."""
    names = table(hf, "id2label")
    if hf.get("num_labels") is None and not names:
        raise UnsupportedModel(
            "config fields num_labels and id2label are absent, so the head has transformers' "
            "default of 2 labels: a reranker has one, whose value is a score"
        )
    labels = integer(hf, "num_labels", len(names))
    if labels != 1:
        field = "id2label" if hf.get("num_labels") is None else "num_labels"
        raise UnsupportedModel(
            f"config field {field} gives {labels} labels: a reranker has one, whose value is a "
            "score"
        )
    name = table(hf, "sentence_transformers").get("activation_fn")
    name = name or hf.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(name).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise UnsupportedModel(
            f"activation {name!r} of scores is not supported: expected Sigmoid or Identity"
        )
    return kind == "Sigmoid"
