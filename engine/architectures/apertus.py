"""Apertus: norms over the heads of q and k, and a feed-forward without a gate whose activation,
xIELU (arXiv:2411.13010), has learned parameters (arXiv:2509.14233)."""

from dataclasses import dataclass, replace

from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import (
    ModelConfig,
    ModelSpec,
    NormPlacement,
    Part,
    TensorSpec,
    UnsupportedModel,
    Xielu,
    linear,
)
from pdserve.engine.models.hf_config import HfConfig, attention_biases, standard

NORMS = NormPlacement(attn_in="attention_layernorm", ffn_in="feedforward_layernorm")
ROPE = {  # transformers' default if config.json has no rope settings
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")
PARAMETERS: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


@dataclass(frozen=True, slots=True)
class XieluMlp:
    """A feed-forward without a gate whose activation is xIELU; implements FeedForward of
    engine/models/config.py."""

    def parts(self, config: ModelConfig, prefix: str) -> tuple[Part, ...]:
        mlp, hidden, size = prefix + "mlp.", config.hidden_size, config.ffn_size
        learned = (TensorSpec(f"{mlp}act_fn.{name}", shape) for name, shape in PARAMETERS.items())
        return (
            linear(mlp, {"up_proj": size}, hidden),
            Xielu(*learned),
            linear(mlp, {"down_proj": hidden}, size),
        )


def parse(hf: HfConfig) -> ModelConfig:
    if hf.get("hidden_act", "xielu") != "xielu":
        raise UnsupportedModel(f"config field hidden_act={hf['hidden_act']!r}: expected xielu")
    if all(hf.get(field) is None for field in ROPE_FIELDS):
        hf = {**hf, "rope_parameters": ROPE}
    config = standard(
        {"rms_norm_eps": 1e-5, **hf, "hidden_act": None},  # no part has an activation by name
        norms=NORMS,
        qk_norm="head",
        **attention_biases(hf),
    )
    layers = tuple(replace(layer, feed_forward=XieluMlp()) for layer in config.layers)
    return replace(config, layers=layers)


GGUF = GgufMapping(
    "apertus",
    tensors={
        "blk.{n}.attn_norm": "model.layers.{n}.attention_layernorm",
        "blk.{n}.ffn_norm": "model.layers.{n}.feedforward_layernorm",
    },
    values={
        f"xielu.{name}": (f"model.layers.{{n}}.mlp.act_fn.{name}", shape)
        for name, shape in PARAMETERS.items()
    },
)
SPEC = ModelSpec(("ApertusForCausalLM",), parse, GGUF)
