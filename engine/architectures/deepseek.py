"""DeepSeek V2, V3, R1 and GLM 4.7 Flash: latent attention, and a grouped mixture of experts after
the first dense layers (arXiv:2405.04434, arXiv:2412.19437).
"""

from collections.abc import Collection
from typing import Any

from pdserve.engine.checkpoints import View
from pdserve.engine.checkpoints.gguf import (
    GROUPED,
    SCORES,
    GgufMapping,
    Metadata,
    expert_config,
    one_number,
    rope_scaling,
)
from pdserve.engine.models import (
    ExpertRouting,
    LatentAttention,
    LayerConfig,
    MixtureOfExperts,
    ModelConfig,
    ModelSpec,
    UnsupportedModel,
    is_mtp,
    stored_experts,
)
from pdserve.engine.models.hf_config import (
    HfConfig,
    grouped_routing,
    integer,
    num_experts,
    num_layers,
    read_rope,
    scores_magnitude,
    standard,
    with_experts,
)

V2, V3, GLM = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"
FIRST_K_DENSE = {V3: 3, GLM: 1}  # defaults of first_k_dense_replace


def parse(hf: HfConfig) -> ModelConfig:
    if hf.get("attention_bias"):
        raise UnsupportedModel(
            "config field attention_bias=True: biases of latent attention are not supported"
        )
    name = str(hf["architectures"][0])
    rank = integer(hf, "q_lora_rank", 0, minimum=0) if hf.get("q_lora_rank") is not None else 0
    latent = LatentAttention(
        rank,
        integer(hf, "kv_lora_rank", 512),
        integer(hf, "qk_nope_head_dim", 128),
        integer(hf, "qk_rope_head_dim", 64),
        integer(hf, "v_head_dim", 128),
        bool(hf.get("rope_interleave", True)),
    )
    heads = integer(hf, "num_attention_heads")
    rope = read_rope({**hf, "partial_rotary_factor": None}, latent.rope_dim)
    config = standard(
        {**hf, "num_key_value_heads": heads, "head_dim": latent.kv_dim},
        layers=(LayerConfig(rope),) * num_layers(hf),
        num_kv_heads=1,
        latent=latent,
        attn_scale=latent.q_dim**-0.5 * scores_magnitude(hf),
    )
    size = integer(hf, "moe_intermediate_size")
    default_scores = "softmax" if name == V2 else "sigmoid"
    scores = hf.get("scoring_func", default_scores)
    mixture = MixtureOfExperts(
        num_experts(hf),
        size,
        grouped_routing(hf) if scores == "sigmoid" else softmax_routing(hf, scores),
        has_correction=scores == "sigmoid",
        shared_size=size * integer(hf, "n_shared_experts", 1, minimum=0),
    )
    return with_experts(config, mixture, sparse_layers(hf, FIRST_K_DENSE.get(name, 0)))


def sparse_layers(hf: HfConfig, default: int) -> Collection[int]:
    """Return the indices of the layers with experts: those that `mlp_layer_types` marks as sparse,
    or else all after the first `first_k_dense_replace` layers."""
    kinds = hf.get("mlp_layer_types")
    if kinds is None:
        first = integer(hf, "first_k_dense_replace", default, minimum=0)
        return range(first, num_layers(hf))
    fits = isinstance(kinds, list | tuple) and len(kinds) == num_layers(hf)
    if not fits or not all(kind in ("dense", "sparse") for kind in kinds):
        raise UnsupportedModel(
            f"config field mlp_layer_types={kinds!r}: expected {num_layers(hf)} values, "
            "each dense or sparse"
        )
    return [n for n, kind in enumerate(kinds) if kind == "sparse"]


def softmax_routing(hf: HfConfig, scores: Any) -> ExpertRouting:
    """Return DeepSeek V2's routing, which ranks each group of experts by its best expert. Raises
    UnsupportedModel unless scores are softmax and `topk_method` is greedy or
    group_limited_greedy."""
    method = hf.get("topk_method", "greedy")
    if scores != "softmax" or method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(
            f"config fields scoring_func={scores!r}, topk_method={method!r} are not supported: "
            "expected sigmoid, or softmax with greedy or group_limited_greedy"
        )
    grouped = {**hf, "norm_topk_prob": hf.get("norm_topk_prob", False)}
    if method == "greedy":
        grouped |= {"n_group": 1, "topk_group": 1}
    return grouped_routing(grouped, "softmax", group_best=1)


# Identify GLM 4.7 Flash, whose files do not state its sigmoid, as llama.cpp does.
GLM_LAYERS, GLM_VOCAB = (47, 48), 154_880


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Return config.json's fields from GGUF metadata, with llama.cpp's defaults for missing ones.
    Head sizes are in the `_mla` fields; files from before 2025-04 have them in the plain length
    fields."""

    def number(key: str) -> int:
        return int(one_number(metadata, f"deepseek2.{key}"))

    vocab = metadata.get("deepseek2.vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
    is_glm = number("block_count") in GLM_LAYERS and vocab == GLM_VOCAB
    gating = metadata.get("deepseek2.expert_gating_func") or (2 if is_glm else 1)
    scores = SCORES.get(gating, "softmax")
    defaults = {"norm_topk_prob": False, "first_k_dense_replace": 0, "n_shared_experts": 0}
    config = defaults | expert_config(metadata, *GROUPED, scores=scores)
    config["routed_scaling_factor"] = config.get("routed_scaling_factor") or 1.0  # 0: none
    config["scoring_func"] = scores
    config["architectures"] = [GLM if is_glm else V3 if scores == "sigmoid" else V2]
    grouped = config.get("n_group", 1) > 1
    config["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    config["kv_lora_rank"] = number("attention.kv_lora_rank")
    has_rank = "deepseek2.attention.q_lora_rank" in metadata
    config["q_lora_rank"] = number("attention.q_lora_rank") if has_rank else None
    suffix = "_mla" if "deepseek2.attention.key_length_mla" in metadata else ""
    config["qk_rope_head_dim"] = number("rope.dimension_count")
    config["qk_nope_head_dim"] = (
        number(f"attention.key_length{suffix}") - config["qk_rope_head_dim"]
    )
    config["v_head_dim"] = number(f"attention.value_length{suffix}")
    log_multiplier = "deepseek2.rope.scaling.yarn_log_multiplier"
    scaling = rope_scaling(metadata, {})
    if scaling and log_multiplier in metadata:
        weight = round(10 * one_number(metadata, log_multiplier), 6)
        config["rope_scaling"] = {**scaling, "mscale": weight, "mscale_all_dim": weight}
    return config


GGUF = GgufMapping(
    "deepseek2",
    tensors={
        "blk.{n}.attn_q_a": "model.layers.{n}.self_attn.q_a_proj",
        "blk.{n}.attn_q_a_norm": "model.layers.{n}.self_attn.q_a_layernorm",
        "blk.{n}.attn_q_b": "model.layers.{n}.self_attn.q_b_proj",
        "blk.{n}.attn_kv_a_mqa": "model.layers.{n}.self_attn.kv_a_proj_with_mqa",
        "blk.{n}.attn_kv_a_norm": "model.layers.{n}.self_attn.kv_a_layernorm",
        "blk.{n}.attn_kv_b": "model.layers.{n}.self_attn.kv_b_proj",
        "blk.{n}.attn_k_b": "model.layers.{n}.self_attn.k_b_proj",
        "blk.{n}.attn_v_b": "model.layers.{n}.self_attn.v_b_proj",
    },
    config=gguf_config,
)


def stored(config: ModelConfig) -> dict[str, View]:
    assert isinstance(config.latent, LatentAttention)
    return stored_experts(config) | config.latent.stored(config)


SPEC = ModelSpec((V2, V3, GLM), parse, GGUF, stored, is_mtp)
