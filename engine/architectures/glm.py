"""GLM 4 of 2024 (GLM-4-9B): Llama with rope over neighbouring dims in half of each head, biases on
q, k and v, gate and up in one tensor (arXiv:2406.12793)."""

from pdserve.engine.checkpoints import RopeRows, View, first_of, fused
from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import ModelConfig, ModelSpec, interleaved_rope, qkv_sizes
from pdserve.engine.models.hf_config import HfConfig, standard


def parse(hf: HfConfig) -> ModelConfig:
    defaults = {"partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7}
    hf = {**defaults, **hf}
    return standard(hf, qkv_bias=bool(hf.get("attention_bias", True)))


def stored(config: ModelConfig) -> dict[str, View]:
    """Return views of fused tensors, with the rows of q and k reordered for rope; q, k and v are
    fused in GGUF files of the first release."""
    views = interleaved_rope(config)
    halves = {"gate_proj": config.ffn_size, "up_proj": config.ffn_size}
    sizes = qkv_sizes(config)
    for n in range(config.num_layers):
        views |= fused(f"model.layers.{n}.mlp.", "gate_up_proj", halves)
        attn = f"model.layers.{n}.self_attn."
        in_qkv = fused(attn, "qkv_proj", sizes)
        views |= {name: view for name, view in in_qkv.items() if name not in views}
        for name, first in (("q_proj", 0), ("k_proj", sizes["q_proj"])):
            for leaf in ("weight", "bias"):
                alone = views[f"{attn}{name}.{leaf}"]
                assert isinstance(alone.rows, RopeRows)
                rows = alone.rows._replace(first=first, stored=sum(sizes.values()))
                together = View(f"{attn}qkv_proj.{leaf}", rows)
                views[f"{attn}{name}.{leaf}"] = first_of(alone, together)
    return views


GGUF = GgufMapping(
    "chatglm",
    tensors={
        "blk.{n}.attn_qkv": "model.layers.{n}.self_attn.qkv_proj",
        "blk.{n}.ffn_up": "model.layers.{n}.mlp.gate_up_proj",
    },
)
SPEC = ModelSpec(("GlmForCausalLM",), parse, GGUF, stored)
