"""Llama 1 to 3 and models with the same structure (SmolLM2, TinyLlama) (arXiv:2302.13971)."""

from typing import Any

from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata, expert_config
from pdserve.engine.models import ModelConfig, ModelSpec, scorer_of
from pdserve.engine.models.hf_config import HfConfig, attention_biases, standard


def parse(hf: HfConfig) -> ModelConfig:
    biases = attention_biases(hf)
    if "attention_out_bias" in hf:  # in GGUF files, to which InternLM 3 is also converted
        biases["o_bias"] = bool(hf["attention_out_bias"])
    return standard(hf, ffn_bias=bool(hf.get("mlp_bias", False)), **biases)


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Return the config.json fields of a Mixtral if the GGUF file has experts, else none."""
    if not metadata.get("llama.expert_count"):
        return {}
    return {"architectures": ["MixtralForCausalLM"], **expert_config(metadata)}


GGUF = GgufMapping("llama", config=gguf_config, permuted=True)
SPEC = ModelSpec(("LlamaForCausalLM",), parse, GGUF)
SCORER = scorer_of("LlamaForSequenceClassification", SPEC)
