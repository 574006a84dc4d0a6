"""Llama 1 to 3 and what is built like them (SmolLM2, TinyLlama): arXiv:2302.13971."""

from pdserve.engine.checkpoints.gguf.mapping import GgufMapping
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.hf_config.fields import HfConfig
from pdserve.engine.models.hf_config.standard import standard
from pdserve.engine.models.spec import ModelSpec


def parse(hf: HfConfig) -> ModelConfig:
    bias = bool(hf.get("attention_bias", False))
    return standard(hf, qkv_bias=bias, o_bias=bias, ffn_bias=bool(hf.get("mlp_bias", False)))


SPEC = ModelSpec(("LlamaForCausalLM",), parse, GgufMapping("llama", permuted=True))
