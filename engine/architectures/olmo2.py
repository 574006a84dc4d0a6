"""OLMo 2: norms after attention and feed-forward instead of before them, and norms over all of q
and over all of k (arXiv:2501.00656)."""

from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import ModelConfig, ModelSpec, NormPlacement
from pdserve.engine.models.hf_config import HfConfig, attention_biases, standard

NORMS = NormPlacement(attn_out="post_attention_layernorm", ffn_out="post_feedforward_layernorm")


def parse(hf: HfConfig) -> ModelConfig:
    return standard(hf, norms=NORMS, qk_norm="row", **attention_biases(hf))


GGUF = GgufMapping(
    "olmo2",
    tensors={
        "blk.{n}.post_attention_norm": "model.layers.{n}.post_attention_layernorm",
        "blk.{n}.post_ffw_norm": "model.layers.{n}.post_feedforward_layernorm",
    },
)
SPEC = ModelSpec(("Olmo2ForCausalLM",), parse, GGUF)
