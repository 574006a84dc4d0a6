"""Command R and Command A: layer norms without biases, attention and feed-forward in parallel after
one norm, rope over neighbouring dims, scaled logits."""

from typing import Any

from pdserve.engine.architectures import phi
from pdserve.engine.checkpoints import Checkpoint, Nth, RopeRows, View
from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata, window_config
from pdserve.engine.models import (
    LayerConfig,
    ModelConfig,
    ModelSpec,
    interleaved_rope,
)
from pdserve.engine.models.hf_config import (
    HfConfig,
    attention_biases,
    head_dim,
    integer,
    layer_norms,
    num_layers,
    positive,
    read_rope,
    sliding_window,
    standard,
    windows,
)
from pdserve.engine.weights.convert import unpack


def _standard(hf: HfConfig, **overrides: Any) -> ModelConfig:
    """Read the config fields that all Cohere models have in common; `overrides` are further fields
    of ModelConfig."""
    return standard(
        hf,
        norms=phi.NORMS,
        **layer_norms(hf, bias=False),
        parallel=True,
        logit_scale=positive(hf, "logit_scale", 0.0625),
        tied_head=bool(hf.get("tie_word_embeddings", True)),
        **attention_biases(hf),
        **overrides,
    )


def parse_cohere(hf: HfConfig) -> ModelConfig:
    """Parse the config of Command R, R+ and Aya: layer norms without biases, attention and
    feed-forward in parallel after one norm, rope over neighbouring dims, scaled logits; in R+ layer
    norms over the heads of q and k."""
    qk_norm = "head_layer" if hf.get("use_qk_norm") else ""
    hf = {"rope_theta": 500_000.0, **hf}
    if hf.get("model_max_length") is not None:  # Command R and R+ state 8192 positions beside it
        hf = {**hf, "max_position_embeddings": hf["model_max_length"]}
    return _standard(hf, qk_norm=qk_norm)


def parse_cohere2(hf: HfConfig) -> ModelConfig:
    """Parse the config of Command R7B and Command A: Command R with a sliding window and rope on
    three of four layers, and neither on the others."""
    rope, pattern = read_rope(hf, head_dim(hf)), integer(hf, "sliding_window_pattern", 4)
    default = [bool((n + 1) % pattern) for n in range(num_layers(hf))]
    sizes = windows(hf, sliding_window(hf, 4096), default)
    return _standard(hf, layers=tuple(LayerConfig(rope if n else None, n) for n in sizes))


def stored(config: ModelConfig) -> dict[str, View]:
    """Return views that reorder q, k and their norms for rope; a norm's tensor has the weights of
    all heads."""
    views = interleaved_rope(config)
    for n, layer in enumerate(config.layers):
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            norm = f"model.layers.{n}.self_attn.{name}_norm"
            if config.qk_norm and layer.rope:
                rows = RopeRows(1, config.head_dim, layer.rope.rotary_dim)
                for head in range(heads):
                    views[f"{norm}.{head}.weight"] = View(
                        f"{norm}.weight", rows, matrix=Nth(head, heads)
                    )
    return views


def is_zero_bias(config: ModelConfig, checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a tensor is a bias of zeros in a checkpoint whose config states no biases."""
    is_extra = name.endswith(".bias") and not config.qkv_bias
    return is_extra and not unpack(checkpoint.tensor(name)).any()


def logit_scale(metadata: Metadata) -> dict[str, Any]:
    key = f"{metadata['general.architecture']}.logit_scale"
    return {"logit_scale": metadata[key]} if key in metadata else {}


def cohere2_gguf_config(metadata: Metadata) -> dict[str, Any]:
    return logit_scale(metadata) | window_config(metadata)


COHERE_GGUF = GgufMapping("command-r", config=logit_scale)
COHERE = ModelSpec(("CohereForCausalLM",), parse_cohere, COHERE_GGUF, stored)
COHERE2_GGUF = GgufMapping("cohere2", config=cohere2_gguf_config)
COHERE2 = ModelSpec(
    ("Cohere2ForCausalLM",), parse_cohere2, COHERE2_GGUF, interleaved_rope, is_zero_bias
)
