"""Mistral 7B and later: Llama with a sliding window on every layer (arXiv:2310.06825).

Of Mistral Small 3.1 and 3.2, which have a vision tower, only the text part is served. Mixtral has a
mixture of experts on every layer (arXiv:2401.04088).
"""

from pdserve.engine.models import MixtureOfExperts, ModelConfig, ModelSpec, stored_experts
from pdserve.engine.models.hf_config import (
    HfConfig,
    num_experts,
    num_layers,
    plain_layers,
    routing,
    sliding_window,
    standard,
    with_experts,
)
from pdserve.engine.models.spec import text_of


def parse_mistral(hf: HfConfig) -> ModelConfig:
    """Parse the config of Mistral 7B and later: Llama with a sliding window on every layer
    (arXiv:2310.06825)."""
    # Version 0.1 relies on the default of 4096; later ones write null for no window.
    return standard(hf, layers=plain_layers(hf, [sliding_window(hf, 4096)] * num_layers(hf)))


MISTRAL = ModelSpec(("MistralForCausalLM",), parse_mistral)


# Of the text model, where config.json omits a field.
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
MISTRAL3 = text_of("Mistral3ForConditionalGeneration", MISTRAL, "mistral", MISTRAL3_TEXT_DEFAULTS)


def parse_mixtral(hf: HfConfig) -> ModelConfig:
    """Parse the config of Mixtral: Mistral with a mixture of experts on every layer
    (arXiv:2401.04088)."""
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, **hf}
    config = standard(hf, layers=plain_layers(hf, [sliding_window(hf)] * num_layers(hf)))
    mixture = MixtureOfExperts(num_experts(hf), config.ffn_size, routing(hf, normalized=True))
    return with_experts(config, mixture, range(config.num_layers))


# GGUF files call it llama.
MIXTRAL = ModelSpec(("MixtralForCausalLM",), parse_mixtral, stored=stored_experts)
