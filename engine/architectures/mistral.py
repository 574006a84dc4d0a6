"""Mistral 7B and later: Llama, in version 0.1 with a sliding window on every layer
(arXiv:2310.06825).

Ministral has windows on some layers, Ministral 3 none, and scales queries by their position. Of
Mistral Small 3.1 and 3.2 and of Ministral 3, which have a vision tower, only the text part is
served. Mixtral has a mixture of experts on every layer (arXiv:2401.04088).
"""

from dataclasses import asdict
from typing import Any

from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata, rope_scaling
from pdserve.engine.models import (
    LayerConfig,
    MixtureOfExperts,
    ModelConfig,
    ModelSpec,
    QueryScaledRope,
    TextModel,
    UnsupportedModel,
    stored_experts,
    text_of,
)
from pdserve.engine.models.hf_config import (
    HfConfig,
    head_dim,
    num_experts,
    num_layers,
    plain_layers,
    positive,
    read_rope,
    routing,
    sliding_window,
    standard,
    table,
    windows,
    with_experts,
)


def parse_mistral(hf: HfConfig) -> ModelConfig:
    """Parse the config of Mistral 7B and later: Llama, in version 0.1 with a sliding window on
    every layer, which its GGUF file (`llama`) does not have (arXiv:2310.06825)."""
    # Version 0.1 relies on the default of 4096; later ones write null for no window.
    return standard(hf, layers=plain_layers(hf, [sliding_window(hf, 4096)] * num_layers(hf)))


MISTRAL = ModelSpec(("MistralForCausalLM",), parse_mistral)


def parse_ministral(hf: HfConfig) -> ModelConfig:
    """Parse the config of Ministral 8B (2024), converted for transformers: Mistral with a sliding
    window on the layers that `layer_types` names."""
    all_layers = [True] * num_layers(hf)
    return standard(hf, layers=plain_layers(hf, windows(hf, sliding_window(hf, 4096), all_layers)))


MINISTRAL = ModelSpec(("MinistralForCausalLM",), parse_ministral)

MINISTRAL3_YARN = {  # transformers' default if config.json has no rope settings
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def parse_ministral3(hf: HfConfig) -> ModelConfig:
    """Parse the config of Ministral 3: Llama with yarn, and queries that grow with their position
    beyond the original context, as in Llama 4."""
    hf = {"head_dim": 128, "rms_norm_eps": 1e-5, **hf}
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf = {**hf, "rope_parameters": MINISTRAL3_YARN}
    rope, size = read_rope(hf, head_dim(hf)), head_dim(hf)
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    beta = table(hf, key).get("llama_4_scaling_beta")
    if beta is not None and beta != 0:
        if rope.kind != "yarn" or rope.rotary_dim != size:
            raise UnsupportedModel(
                f"config field llama_4_scaling_beta={beta!r}: expected yarn over all {size} dims "
                f"of a head, not {rope.kind} over {rope.rotary_dim}"
            )
        beta = positive(table(hf, key), "llama_4_scaling_beta")
        rope = QueryScaledRope(**asdict(rope), query_beta=beta)
    window = sliding_window(hf)
    return standard(hf, layers=(LayerConfig(rope, window),) * num_layers(hf))


def ministral3_gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Return config.json's fields of a Ministral 3, or of a Llama if the file has none of its keys:
    of a Mistral Small 3, whose GGUF files have the same name."""
    beta = metadata.get("mistral3.attention.temperature_scale")
    weight = metadata.get("mistral3.rope.scaling.yarn_log_multiplier")
    if beta is None and weight is None:
        return {"architectures": ["LlamaForCausalLM"]}
    scaling = {**(rope_scaling(metadata, {}) or {}), "llama_4_scaling_beta": beta}
    if weight is not None:
        scaling |= {"mscale": 1.0, "mscale_all_dim": weight}
    return {"rope_scaling": scaling}


MINISTRAL3_GGUF = GgufMapping("mistral3", config=ministral3_gguf_config, permuted=True)
MINISTRAL3 = ModelSpec(("Ministral3ForCausalLM",), parse_ministral3, MINISTRAL3_GGUF)

# Of the text models, where config.json omits a field.
MISTRAL3_TEXT_DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
MINISTRAL3_TEXT_DEFAULTS = {
    **MISTRAL3_TEXT_DEFAULTS,
    "vocab_size": 131_072,
    "num_hidden_layers": 34,
    "max_position_embeddings": 262_144,
    "sliding_window": None,
}
MISTRAL3 = text_of(
    "Mistral3ForConditionalGeneration",
    TextModel("mistral", parse_mistral, MISTRAL3_TEXT_DEFAULTS),
    TextModel("ministral3", parse_ministral3, MINISTRAL3_TEXT_DEFAULTS),
)


def parse_mixtral(hf: HfConfig) -> ModelConfig:
    """Parse the config of Mixtral: Mistral with a mixture of experts on every layer
    (arXiv:2401.04088)."""
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, **hf}
    config = standard(hf, layers=plain_layers(hf, [sliding_window(hf)] * num_layers(hf)))
    mixture = MixtureOfExperts(num_experts(hf), config.ffn_size, routing(hf, normalized=True))
    return with_experts(config, mixture, range(config.num_layers))


# GGUF files call it llama.
MIXTRAL = ModelSpec(("MixtralForCausalLM",), parse_mixtral, stored=stored_experts)
