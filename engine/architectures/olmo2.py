"""OLMo 2 and 3: norms after attention and feed-forward instead of before them, and norms over all
of q and over all of k (arXiv:2501.00656). OLMo 3 has windows on three of four layers
(arXiv:2512.13961)."""

from typing import Any

from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata, rope_scaling, window_config
from pdserve.engine.models import (
    LayerConfig,
    ModelConfig,
    ModelSpec,
    NormPlacement,
    UnsupportedModel,
)
from pdserve.engine.models.hf_config import (
    HfConfig,
    attention_biases,
    head_dim,
    num_layers,
    read_rope,
    sliding_window,
    standard,
    table,
    windows,
)

NORMS = NormPlacement(attn_out="post_attention_layernorm", ffn_out="post_feedforward_layernorm")


def parse_olmo2(hf: HfConfig) -> ModelConfig:
    """Parse the config of OLMo 2: norms after attention and feed-forward instead of before them,
    and norms over all of q and over all of k (arXiv:2501.00656)."""
    return standard(hf, norms=NORMS, qk_norm="row", **attention_biases(hf))


def parse_olmo3(hf: HfConfig) -> ModelConfig:
    """Parse the config of OLMo 3: OLMo 2 with a sliding window on three of four layers; only the
    others have rope scaling (arXiv:2512.13961)."""
    hf = {"rms_norm_eps": 1e-5, **hf}
    kind = table(hf, "rope_parameters").get("rope_type", "default")
    if kind != "default":  # transformers ignores it
        raise UnsupportedModel(
            f"config field rope_parameters: OLMo 3 needs {kind} under full_attention, "
            "since layers with a window have no rope scaling"
        )
    default = [bool((n + 1) % 4) for n in range(num_layers(hf))]
    size, theta = head_dim(hf), 500_000.0
    full = read_rope(hf, size, "full_attention", default_theta=theta)
    local = read_rope(hf, size, "sliding_attention", default_theta=theta, scaled=False)
    layers = tuple(
        LayerConfig(local if window else full, window)
        for window in windows(hf, sliding_window(hf, 4096), default)
    )
    return standard(hf, norms=NORMS, qk_norm="row", layers=layers, **attention_biases(hf))


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Return the config.json fields of an OLMo 3 if the GGUF file has windows, else none."""
    config = window_config(metadata)
    if not config:
        return {}
    config["architectures"] = ["Olmo3ForCausalLM"]
    factor = metadata.get("olmo2.rope.scaling.attn_factor")
    scaling = rope_scaling(metadata, {})
    if scaling and factor is not None:
        # The converter writes config.json's value, which includes yarn's magnitude.
        config["rope_scaling"] = {**scaling, "attention_factor": factor}
    return config


GGUF = GgufMapping(
    "olmo2",
    tensors={
        "blk.{n}.post_attention_norm": "model.layers.{n}.post_attention_layernorm",
        "blk.{n}.post_ffw_norm": "model.layers.{n}.post_feedforward_layernorm",
    },
    config=gguf_config,
)
OLMO2 = ModelSpec(("Olmo2ForCausalLM",), parse_olmo2, GGUF)
# GGUF files call it olmo2.
OLMO3 = ModelSpec(("Olmo3ForCausalLM",), parse_olmo3)
