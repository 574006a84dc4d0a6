"""Mixtral: Mistral with a mixture of experts on every layer (arXiv:2401.04088)."""

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.experts import MixtureOfExperts, stored_experts
from pdserve.engine.models.hf_config.experts import num_experts, routing, with_experts
from pdserve.engine.models.hf_config.fields import HfConfig
from pdserve.engine.models.hf_config.standard import (
    num_layers,
    plain_layers,
    sliding_window,
    standard,
)
from pdserve.engine.models.spec import ModelSpec


def parse(hf: HfConfig) -> ModelConfig:
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, **hf}
    config = standard(hf, layers=plain_layers(hf, [sliding_window(hf)] * num_layers(hf)))
    mixture = MixtureOfExperts(num_experts(hf), config.ffn_size, routing(hf, normalized=True))
    return with_experts(config, mixture, range(config.num_layers))


SPEC = ModelSpec(("MixtralForCausalLM",), parse, stored=stored_experts)  # GGUF files call it llama
