"""config.json's terms built from GGUF metadata: what is common to all architectures.

An architecture's GgufMapping.config adds to it or overrides it.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

from pdserve.engine.checkpoints.gguf.mapping import Metadata
from pdserve.engine.checkpoints.source import CheckpointError

REQUIRED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
}


def common_config(
    metadata: Metadata, tensors: Collection[str], rope_factors: Sequence[float] = ()
) -> dict[str, Any]:
    """Config entries that every architecture may have.

    `tensors` are the file's own names; `rope_factors` the values of rope_freqs.weight, if it is
    one of them. Raises CheckpointError if a required key is missing or differs between layers.
    """
    arch = metadata["general.architecture"]
    config: dict[str, Any] = {
        hf: one_number(metadata, f"{arch}.{key}") for key, hf in REQUIRED.items()
    }
    for key, hf in OPTIONAL.items():
        if f"{arch}.{key}" in metadata:
            config[hf] = one_number(metadata, f"{arch}.{key}")
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    scaling = rope_scaling(metadata, rope_factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    config |= _partial_rotary(metadata, config)
    for kind in ("bos", "eos"):
        if (token := metadata.get(f"tokenizer.ggml.{kind}_token_id")) is not None:
            config[f"{kind}_token_id"] = token
    return config


def one_number(metadata: Metadata, key: str) -> int | float:
    """A number, also if given once per layer as long as all are equal."""
    value = metadata.get(key)
    if isinstance(value, Sequence) and not isinstance(value, str) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        found = "is missing" if value is None else "is not one number"
        raise CheckpointError(f"GGUF metadata key {key} {found}")
    return value


def rope_scaling(metadata: Metadata, factors: Sequence[float]) -> dict[str, Any] | None:
    """config.json's `rope_scaling`, or None.

    Llama 3 files carry their scaling as one divisor per frequency in a tensor rather than as the
    parameters it came from; it is passed on as such.
    """
    prefix = f"{metadata['general.architecture']}.rope.scaling."
    kind = metadata.get(prefix + "type", "none")
    if factors:
        if kind != "none":
            raise CheckpointError(f"GGUF has rope_freqs.weight and rope scaling {kind!r}")
        return {"rope_type": "factors", "factors": list(factors)}
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": one_number(metadata, prefix + "factor")}
    if kind == "yarn":
        original = prefix + "original_context_length"
        scaling["original_max_position_embeddings"] = one_number(metadata, original)
        for key, hf in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if prefix + key in metadata:
                scaling[hf] = one_number(metadata, prefix + key)
        if prefix + "attn_factor" in metadata:
            # GGML multiplies it with yarn's own magnitude; config.json states the product.
            own = 0.1 * math.log(scaling["factor"]) + 1.0
            scaling["attention_factor"] = own * one_number(metadata, prefix + "attn_factor")
    return scaling


def _partial_rotary(metadata: Metadata, config: dict[str, Any]) -> dict[str, float]:
    """The share of a head that rotates, where it is not the whole head."""
    key = f"{metadata['general.architecture']}.rope.dimension_count"
    if key not in metadata:
        return {}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or (config["hidden_size"] // heads if heads else 0)
    rotary = one_number(metadata, key)
    return (
        {} if rotary == head_dim or not head_dim else {"partial_rotary_factor": rotary / head_dim}
    )
