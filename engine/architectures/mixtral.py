"""Mixtral: Mistral with a mixture of experts on every layer (arXiv:2401.04088)."""

from pdserve.engine.models import MixtureOfExperts, ModelConfig, ModelSpec, stored_experts
from pdserve.engine.models.hf_config import (
    HfConfig,
    num_experts,
    num_layers,
    plain_layers,
    routing,
    sliding_window,
    with_experts,
)
from pdserve.engine.models.hf_config.standard import standard


def parse(hf: HfConfig) -> ModelConfig:
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, **hf}
    config = standard(hf, layers=plain_layers(hf, [sliding_window(hf)] * num_layers(hf)))
    mixture = MixtureOfExperts(num_experts(hf), config.ffn_size, routing(hf, normalized=True))
    return with_experts(config, mixture, range(config.num_layers))


SPEC = ModelSpec(("MixtralForCausalLM",), parse, stored=stored_experts)  # GGUF files call it llama
