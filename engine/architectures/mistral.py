"""Mistral 7B and later: Llama with a sliding window on every layer (arXiv:2310.06825)."""

from pdserve.engine.models import ModelConfig, ModelSpec
from pdserve.engine.models.hf_config import HfConfig, num_layers, plain_layers, sliding_window
from pdserve.engine.models.hf_config.standard import standard


def parse(hf: HfConfig) -> ModelConfig:
    # Version 0.1 relies on the default of 4096; later ones write null for no window.
    return standard(hf, layers=plain_layers(hf, [sliding_window(hf, 4096)] * num_layers(hf)))


SPEC = ModelSpec(("MistralForCausalLM",), parse)
