"""Qwen 2 VL, 2.5 VL and 3 VL, of which only the text part is served: Qwen 2 or Qwen 3 with
multimodal rope (arXiv:2409.12191). Its three positions (time, height, width) are equal for text, so
it is ordinary rope here."""

from typing import Any

from pdserve.engine.architectures import qwen2, qwen3
from pdserve.engine.checkpoints.gguf import GgufMapping, Metadata
from pdserve.engine.models import ModelConfig, TextModel, text_of
from pdserve.engine.models.hf_config import HfConfig, num_layers, table

# Of the text models, where config.json omits a field.
QWEN2_DEFAULTS = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
QWEN3_DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 128_000,
    "rope_theta": 500_000.0,
}


def as_text(hf: HfConfig) -> HfConfig:
    """Return the config with ordinary rope in place of multimodal rope without scaling."""
    changed = dict(hf)
    for key in ("rope_parameters", "rope_scaling"):
        rope = table(hf, key)
        if "mrope" in (rope.get("rope_type"), rope.get("type")):
            changed[key] = {**rope, "rope_type": "default"}
    return changed


def parse_qwen2(hf: HfConfig) -> ModelConfig:
    return qwen2.parse_dense(as_text(hf))


def parse_qwen3(hf: HfConfig) -> ModelConfig:
    return qwen3.with_windows(as_text(hf), [0] * num_layers(hf))


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Read the keys that concern images alone."""
    arch = metadata["general.architecture"]
    for key in ("rope.dimension_sections", "n_deepstack_layers"):
        metadata.get(f"{arch}.{key}")
    return {}


QWEN2_VL = text_of(
    "Qwen2VLForConditionalGeneration",
    TextModel("qwen2_vl_text", parse_qwen2, QWEN2_DEFAULTS),
    flat=True,
    gguf=GgufMapping("qwen2vl", config=gguf_config),
)
QWEN2_5_VL = text_of(
    "Qwen2_5_VLForConditionalGeneration",
    TextModel("qwen2_5_vl_text", parse_qwen2, QWEN2_DEFAULTS),
    flat=True,  # GGUF files of it say qwen2vl
)
QWEN3_VL = text_of(
    "Qwen3VLForConditionalGeneration",
    TextModel("qwen3_vl_text", parse_qwen3, QWEN3_DEFAULTS),
    flat=True,
    gguf=GgufMapping("qwen3vl", config=gguf_config),
)
