"""GPT-NeoX and Pythia: layer norms with biases, rope over a quarter of each head, and attention in
parallel with a feed-forward that has no gate and another norm (arXiv:2204.06745)."""

from typing import Any

from pdserve.engine.checkpoints import Checkpoint, RopeRows, View, first_of, fused
from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata
from pdserve.engine.models import (
    EMBEDDING,
    HEAD,
    ModelConfig,
    ModelSpec,
    qkv_sizes,
)
from pdserve.engine.models.hf_config import HfConfig, layer_norms, standard

RENAMED = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
# Masks and frequencies, which older checkpoints store.
UNUSED = (".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq")


def parse(hf: HfConfig) -> ModelConfig:
    defaults = {
        "hidden_act": "gelu",
        "partial_rotary_factor": hf.get("rotary_pct", 0.25),
        "rope_theta": hf.get("rotary_emb_base"),
    }
    bias = bool(hf.get("attention_bias", True))
    return standard(
        # Fields that it does not have, and transformers ignores.
        {**defaults, **hf, "num_key_value_heads": None, "head_dim": None},
        **layer_norms(hf),
        parallel=bool(hf.get("use_parallel_residual", True)),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        ffn_bias=True,
    )


def stored(config: ModelConfig) -> dict[str, View]:
    """Return views that find the model's tensors under GPT-NeoX's names. One tensor has q, k and v
    of each head in turn; in GGUF it has all of q, then k, then v."""
    views = {
        EMBEDDING: View("gpt_neox.embed_in.weight"),
        HEAD: View("embed_out.weight"),
        **{f"model.norm.{x}": View(f"gpt_neox.final_layer_norm.{x}") for x in ("weight", "bias")},
    }
    heads, dim = config.num_heads, config.head_dim
    for n in range(config.num_layers):
        here, there = f"model.layers.{n}.", f"gpt_neox.layers.{n}."
        for name, other in RENAMED.items():
            views |= {f"{here}{name}.{x}": View(f"{there}{other}.{x}") for x in ("weight", "bias")}
        views |= fused(f"{here}self_attn.", "qkv_proj", qkv_sizes(config))
        for part, module in enumerate(("q_proj", "k_proj", "v_proj")):
            rows = RopeRows(heads, dim, 0, 0, False, part * dim, 3 * dim, 3 * heads * dim)
            for leaf in ("weight", "bias"):
                name = f"{here}self_attn.{module}.{leaf}"
                in_turn = View(f"{there}attention.query_key_value.{leaf}", rows)
                views[name] = first_of(in_turn, views[name])
    return views


def is_unused(config: ModelConfig, checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(UNUSED)


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    return {"use_parallel_residual": metadata.get("gptneox.use_parallel_residual", True)}


GGUF = GgufMapping(
    "gptneox",
    tensors={"blk.{n}.attn_qkv": "model.layers.{n}.self_attn.qkv_proj"},
    config=gguf_config,
)
SPEC = ModelSpec(("GPTNeoXForCausalLM",), parse, GGUF, stored, is_unused)
