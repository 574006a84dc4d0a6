"""Qwen 2 and 2.5: Llama with biases on q, k and v, and an optional window on the upper layers."""

from collections.abc import Sequence

from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import ModelConfig, ModelSpec
from pdserve.engine.models.hf_config import (
    HfConfig,
    integer,
    num_layers,
    plain_layers,
    sliding_window,
    windowed,
)
from pdserve.engine.models.hf_config.standard import standard


def windows(hf: HfConfig) -> Sequence[int]:
    """Return the window of each layer; only with `use_sliding_window`, by default from layer
    `max_window_layers` on."""
    count = num_layers(hf)
    if not hf.get("use_sliding_window", False):
        return [0] * count
    first = integer(hf, "max_window_layers", 28, minimum=0)
    has_window = windowed(hf, [n >= first for n in range(count)])
    return [sliding_window(hf, 4096) if has else 0 for has in has_window]


def parse(hf: HfConfig) -> ModelConfig:
    return standard(hf, qkv_bias=True, layers=plain_layers(hf, windows(hf)))


SPEC = ModelSpec(("Qwen2ForCausalLM",), parse, GgufMapping("qwen2"))
