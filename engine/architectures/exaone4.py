"""EXAONE 4: norms after attention and feed-forward instead of before them, RMS norms over the heads
of q and k; where layers have windows, those without one have no rope (arXiv:2507.11407)."""

from typing import Any

from pdserve.engine.architectures.olmo2 import GGUF as OLMO2_GGUF
from pdserve.engine.architectures.olmo2 import NORMS
from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata, window_config
from pdserve.engine.models import LayerConfig, ModelConfig, ModelSpec
from pdserve.engine.models.hf_config import (
    HfConfig,
    head_dim,
    integer,
    num_layers,
    read_rope,
    sliding_window,
    standard,
    windows,
)


def layers(hf: HfConfig) -> tuple[LayerConfig, ...]:
    rope, window = read_rope(hf, head_dim(hf)), sliding_window(hf, 4096)
    if not window:
        return (LayerConfig(rope),) * num_layers(hf)
    # A pattern in letters, which releases have, comes with layer_types.
    pattern = integer(hf, "sliding_window_pattern", 4) if hf.get("layer_types") is None else 1
    default = [bool((n + 1) % pattern) for n in range(num_layers(hf))]
    return tuple(LayerConfig(rope if one else None, one) for one in windows(hf, window, default))


def parse(hf: HfConfig) -> ModelConfig:
    hf = {"rms_norm_eps": 1e-5, **hf}
    return standard(hf, norms=NORMS, qk_norm="head", layers=layers(hf))


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    return {"sliding_window": None, **window_config(metadata)}


GGUF = GgufMapping("exaone4", tensors=OLMO2_GGUF.tensors, config=gguf_config)
SPEC = ModelSpec(("Exaone4ForCausalLM",), parse, GGUF)
