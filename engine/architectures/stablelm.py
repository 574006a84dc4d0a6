"""StableLM 2 and 3B: layer norms, rope over a quarter of each head; in the 12B model attention and
feed-forward in parallel, and layer norms over the heads of q and k (arXiv:2402.17834)."""

from itertools import product
from typing import Any

from pdserve.engine.architectures import phi
from pdserve.engine.checkpoints import Nth, View, first_of
from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata
from pdserve.engine.models import PRE_NORMS, ModelConfig, ModelSpec
from pdserve.engine.models.hf_config import HfConfig, layer_norms, standard


def parse(hf: HfConfig) -> ModelConfig:
    parallel = bool(hf.get("use_parallel_residual", False))
    return standard(
        {"partial_rotary_factor": 0.25, **hf},
        norms=phi.NORMS if parallel else PRE_NORMS,
        **layer_norms(hf),
        parallel=parallel,
        # GGUF files are read as use_qk_norm.
        qk_norm="head_layer" if hf.get("qk_layernorm", hf.get("use_qk_norm")) else "",
        # GGUF uses the name that other architectures have.
        qkv_bias=bool(hf.get("use_qkv_bias", hf.get("attention_bias", False))),
    )


def stored(config: ModelConfig) -> dict[str, View]:
    """Return views of the norms of heads: a tensor for each head, or one for all in GGUF."""
    views: dict[str, View] = {}
    if config.qk_norm:
        counts = {"q": config.num_heads, "k": config.num_kv_heads}
        for n, (name, heads) in product(range(config.num_layers), counts.items()):
            attn = f"model.layers.{n}.self_attn."
            for head in range(heads):
                views[f"{attn}{name}_norm.{head}.weight"] = first_of(
                    View(f"{attn}{name}_layernorm.norms.{head}.weight"),
                    View(f"{attn}{name}_norm.weight", matrix=Nth(head, heads)),
                )
    return views


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Read the key that llama.cpp ignores, since its converter writes true if config.json has no
    such field. A layer of the sequential form has another norm, which `common_config` looks for."""
    metadata.get("stablelm.use_parallel_residual")
    return {}


GGUF = GgufMapping("stablelm", config=gguf_config)
SPEC = ModelSpec(("StableLmForCausalLM",), parse, GGUF, stored)
