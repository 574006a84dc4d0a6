"""StableLM 2 and 3B: layer norms, rope over a quarter of each head, optionally attention and
feed-forward in parallel (arXiv:2402.17834)."""

from typing import Any

from pdserve.engine.architectures import phi
from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata
from pdserve.engine.models import PRE_NORMS, ModelConfig, ModelSpec, UnsupportedModel
from pdserve.engine.models.hf_config import HfConfig, positive, standard


def parse(hf: HfConfig) -> ModelConfig:
    if hf.get("qk_layernorm"):
        raise UnsupportedModel(
            "config field qk_layernorm: layer norms over q and k are not supported"
        )
    parallel = bool(hf.get("use_parallel_residual", False))
    return standard(
        {"partial_rotary_factor": 0.25, **hf},
        norms=phi.NORMS if parallel else PRE_NORMS,
        norm_kind="layer",
        norm_bias=True,
        norm_eps=positive(hf, "layer_norm_eps", 1e-5, maximum=1.0),
        parallel=parallel,
        # GGUF uses the name that other architectures have.
        qkv_bias=bool(hf.get("use_qkv_bias", hf.get("attention_bias", False))),
    )


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    return {"use_parallel_residual": metadata.get("stablelm.use_parallel_residual", True)}


SPEC = ModelSpec(("StableLmForCausalLM",), parse, GgufMapping("stablelm", config=gguf_config))
