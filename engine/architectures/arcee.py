"""Arcee (AFM): Llama whose feed-forward has no gate and squares the positive values."""

from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import ModelConfig, ModelSpec
from pdserve.engine.models.hf_config import HfConfig, attention_biases, standard


def parse(hf: HfConfig) -> ModelConfig:
    return standard(
        {"hidden_act": "relu2", "rms_norm_eps": 1e-5, **hf},
        gated=False,
        ffn_bias=bool(hf.get("mlp_bias", False)),
        **attention_biases(hf),
    )


SPEC = ModelSpec(("ArceeForCausalLM",), parse, GgufMapping("arcee", permuted=True))
