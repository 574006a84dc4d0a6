"""Phi 1, 1.5 and 2: layer norms with biases, and attention in parallel with a feed-forward that has
no gate."""

from pdserve.engine.checkpoints import View, fused, renamed
from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import ModelConfig, ModelSpec, NormPlacement, UnsupportedModel, qkv_sizes
from pdserve.engine.models.hf_config import HfConfig, layer_norms, standard

# Attention and feed-forward share one input norm.
NORMS = NormPlacement(attn_in="input_layernorm", ffn_in="input_layernorm")
RENAMED = {
    "self_attn.o_proj": "self_attn.dense",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}


def parse(hf: HfConfig) -> ModelConfig:
    if hf.get("qk_layernorm"):
        raise UnsupportedModel(
            "config field qk_layernorm: layer norms over q and k are not supported"
        )
    return standard(
        {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5, **hf},
        norms=NORMS,
        **layer_norms(hf),
        parallel=True,
        gated=False,
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        head_bias=True,
    )


def stored(config: ModelConfig) -> dict[str, View]:
    """Return views that find the model's tensors under Phi's names; GGUF stores q, k and v in one
    tensor."""
    views = renamed("model.", {"norm": "final_layernorm"})
    for n in range(config.num_layers):
        views |= renamed(f"model.layers.{n}.", RENAMED)
        views |= fused(f"model.layers.{n}.self_attn.", "qkv_proj", qkv_sizes(config))
    return views


GGUF = GgufMapping("phi2", tensors={"blk.{n}.attn_qkv": "model.layers.{n}.self_attn.qkv_proj"})
SPEC = ModelSpec(("PhiForCausalLM",), parse, GGUF, stored)
