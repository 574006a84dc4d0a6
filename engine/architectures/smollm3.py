"""SmolLM 3: Llama without rope on every fourth layer."""

from dataclasses import replace

from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import LayerConfig, ModelConfig, ModelSpec, UnsupportedModel
from pdserve.engine.models.hf_config import (
    HfConfig,
    attention_biases,
    integer,
    num_layers,
    plain_layers,
    sliding_window,
    standard,
    windows,
)


def has_rope(hf: HfConfig) -> list[bool]:
    """Return for each layer whether it has rope: from the field `no_rope_layers`, or else all
    layers but every `no_rope_layer_interval`th."""
    flags, count = hf.get("no_rope_layers"), num_layers(hf)
    if flags is None:
        interval = integer(hf, "no_rope_layer_interval", 4)
        return [bool((n + 1) % interval) for n in range(count)]
    if (
        not isinstance(flags, list)
        or len(flags) < count
        or any(flag not in (0, 1) for flag in flags)
    ):
        raise UnsupportedModel(
            f"config field no_rope_layers={flags!r}: expected at least {count} values, each 0 or 1"
        )
    return [bool(flag) for flag in flags[:count]]


def layers(hf: HfConfig) -> tuple[LayerConfig, ...]:
    ropes = has_rope(hf)
    window = sliding_window(hf) if hf.get("use_sliding_window", False) else 0
    layer_windows = windows(hf, window, [not rope for rope in ropes])
    return tuple(
        layer if rope else replace(layer, rope=None)
        for layer, rope in zip(plain_layers(hf, layer_windows), ropes, strict=True)
    )


def parse(hf: HfConfig) -> ModelConfig:
    hf = {"rope_theta": 2e6, **hf}
    return standard(
        hf,
        layers=layers(hf),
        **attention_biases(hf),
        ffn_bias=bool(hf.get("mlp_bias", False)),
        tied_head=bool(hf.get("tie_word_embeddings", True)),
    )


SPEC = ModelSpec(("SmolLM3ForCausalLM",), parse, GgufMapping("smollm3", permuted=True))
