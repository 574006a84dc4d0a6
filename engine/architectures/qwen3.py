"""Qwen 3, dense: RMS norms over the heads of q and k, no biases by default (arXiv:2505.09388)."""

from collections.abc import Sequence

from pdserve.engine.architectures.qwen2 import windows
from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import ModelConfig, ModelSpec
from pdserve.engine.models.hf_config import HfConfig, integer, plain_layers
from pdserve.engine.models.hf_config.standard import standard


def parse(hf: HfConfig) -> ModelConfig:
    return with_windows(hf, windows(hf))


def with_windows(hf: HfConfig, windows: Sequence[int]) -> ModelConfig:
    """Return Qwen 3's config with these windows, by layer."""
    bias = bool(hf.get("attention_bias", False))
    size = integer(hf, "head_dim", 128)
    return standard(
        hf,
        head_dim=size,
        attn_scale=size**-0.5,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        layers=plain_layers({**hf, "head_dim": size}, windows),
    )


SPEC = ModelSpec(("Qwen3ForCausalLM",), parse, GgufMapping("qwen3"))
