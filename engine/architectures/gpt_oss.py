"""gpt-oss: experts with biases and a clamped gate, attention sinks, a sliding window on every
other layer (arXiv:2508.10925).
"""

from typing import Any

from pdserve.engine.checkpoints import Nth, View, first_of, renamed
from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata, expert_config, rope_scaling
from pdserve.engine.models import MixtureOfExperts, ModelConfig, ModelSpec, UnsupportedModel
from pdserve.engine.models.hf_config import (
    HfConfig,
    num_experts,
    num_layers,
    plain_layers,
    positive,
    routing,
    sliding_window,
    standard,
    windows,
    with_experts,
)

YARN = {  # transformers' default if config.json has no rope scaling
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GATE = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # of the only gate that the kernels have
# An expert's modules: the stack that each is stored in, and its rows there.
STACKS = {
    "gate_proj": ("gate_up_proj", slice(0, None, 2)),
    "up_proj": ("gate_up_proj", slice(1, None, 2)),
    "down_proj": ("down_proj", None),
}


def parse(hf: HfConfig) -> ModelConfig:
    for key, supported in GATE.items():
        if positive(hf, key, supported) != supported:
            raise UnsupportedModel(f"config field {key}={hf[key]!r}: expected {supported}")
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 150_000.0, **hf}
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf = {**hf, "rope_scaling": YARN}
    default = [n % 2 == 0 for n in range(num_layers(hf))]
    bias = bool(hf.get("attention_bias", True))
    config = standard(
        hf,
        layers=plain_layers(hf, windows(hf, sliding_window(hf, 128), default)),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
    )
    mixture = MixtureOfExperts(
        num_experts(hf),
        config.ffn_size,
        routing(hf, normalized=True),
        has_bias=True,
        activation="swiglu_oai",
    )
    return with_experts(config, mixture, range(config.num_layers))


def stored(config: ModelConfig) -> dict[str, View]:
    """Return views that find gpt-oss's router, sinks and experts in a checkpoint. Gate and up of an
    expert are interleaved rows of one matrix, which files of plain numbers store transposed; GGUF
    stores gate and up separately."""
    views: dict[str, View] = {}
    for n, layer in enumerate(config.layers):
        assert isinstance(layer.feed_forward, MixtureOfExperts)
        count = layer.feed_forward.num_experts
        prefix = f"model.layers.{n}."
        experts = prefix + "mlp.experts."
        views |= renamed(prefix + "mlp.", {"gate": "router"})
        views[prefix + "self_attn.sinks"] = View(prefix + "self_attn.sinks.weight")  # GGUF's
        for e in range(count):
            nth = Nth(e, count)
            for name, (stack, rows) in STACKS.items():
                stored_as = experts + stack
                views[f"{experts}{e}.{name}.weight"] = first_of(
                    View(f"{stored_as}.weight", rows, nth),
                    View(stored_as, rows, nth, transposed=True),
                    View(f"{experts}{name}.weight", matrix=nth),  # GGUF
                )
                views[f"{experts}{e}.{name}.bias"] = first_of(
                    View(f"{stored_as}_bias", rows, nth),
                    View(f"{experts}{name}.bias", matrix=nth),  # GGUF
                )
    return views


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Return config.json's fields from gpt-oss's GGUF metadata, which omits which layers have
    windows and whether the ends of yarn's ramp are whole dims. A file without scaling fields has no
    rope scaling, as in llama.cpp."""
    window = metadata.get("gpt-oss.attention.sliding_window")
    config = expert_config(metadata) | {"sliding_window": window}
    scaling = rope_scaling(metadata, {}) or {"rope_type": "default"}
    config["rope_scaling"] = {**scaling, "truncate": False}
    if "gpt-oss.rope.freq_base" not in metadata:
        config["rope_theta"] = 10_000.0
    return config


GGUF = GgufMapping(
    "gpt-oss",
    tensors={
        "blk.{n}.attn_sinks": "model.layers.{n}.self_attn.sinks",
        "blk.{n}.post_attention_norm": "model.layers.{n}.post_attention_layernorm",
    },
    config=gguf_config,
)
SPEC = ModelSpec(("GptOssForCausalLM",), parse, GGUF, stored)
