"""The config.json of releases is interpreted correctly, under each architecture name that they
use."""

import math
from typing import Any

import pytest

from pdserve.engine.architectures import parse_config
from pdserve.engine.models import (
    POSITIONS,
    Classifier,
    ExpertRouting,
    LatentAttention,
    LearnedPositions,
    MixtureOfExperts,
    ModelConfig,
    UnsupportedModel,
)
from pdserve.engine.models.rope import RopeConfig

YI = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 64000,
}
QWQ = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 40960,
    "max_window_layers": 64,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
R1_QWEN = {
    **QWQ,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 21,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "use_mrope": False,
    "vocab_size": 151936,
}
R1_LLAMA = {
    **YI,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DEEPSEEK_V2_LITE = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {
        **DEEPSEEK_V3["rope_scaling"],  # type: ignore[dict-item]
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
GLM_47_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}

FALCON3 = {
    **YI,
    "head_dim": 256,
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "rope_theta": 1000042,
    "vocab_size": 131072,
}

GPT_NEOX_20B = {
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu_fast",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "vocab_size": 50432,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
APERTUS_8B = {
    "architectures": ["ApertusForCausalLM"],
    "attention_bias": False,
    "hidden_act": "xielu",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "post_norm": False,
    "qk_norm": True,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
        "type": "llama3",
    },
    "rope_theta": 12000000,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
BGE_SMALL = {
    "architectures": ["BertModel"],
    "hidden_act": "gelu",
    "hidden_size": 384,
    "id2label": {"0": "LABEL_0"},
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
MS_MARCO_MINI_LM = {
    **BGE_SMALL,
    "architectures": ["BertForSequenceClassification"],
    "num_hidden_layers": 6,
    "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
}
BGE_M3 = {
    "architectures": ["XLMRobertaModel"],
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 8194,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 1,
    "position_embedding_type": "absolute",
    "type_vocab_size": 1,
    "vocab_size": 250002,
}
BGE_RERANKER_BASE = {
    **BGE_M3,
    "architectures": ["XLMRobertaForSequenceClassification"],
    "hidden_size": 768,
    "id2label": {"0": "LABEL_0"},
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
}
GTE_MODERNBERT = {
    "architectures": ["ModernBertModel"],
    "attention_bias": False,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_pooling": "mean",
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "intermediate_size": 1152,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "vocab_size": 50368,
}
GTE_RERANKER_MODERNBERT = {
    **GTE_MODERNBERT,
    "architectures": ["ModernBertForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
}
COMMAND_R = {
    "architectures": ["CohereForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "model_max_length": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "num_key_value_heads": 64,
    "rope_theta": 8000000.0,
    "use_qk_norm": False,
    "vocab_size": 256000,
}


def shapes(config: ModelConfig) -> tuple[int, ...]:
    return config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim


@pytest.mark.parametrize(
    ("released", "sizes", "rope", "has_bias"),
    [
        (YI, (32, 32, 4, 128), RopeConfig(5e6, 128), False),
        (FALCON3, (22, 12, 4, 256), RopeConfig(1000042.0, 256), False),
        (QWQ, (64, 40, 8, 128), RopeConfig(1e6, 128), True),
        (R1_QWEN, (28, 12, 2, 128), RopeConfig(1e4, 128), True),
        (
            R1_LLAMA,
            (32, 32, 8, 128),
            RopeConfig(5e5, 128, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
            False,
        ),
    ],
    ids=["Yi 1.5 6B", "Falcon 3 3B", "QwQ 32B", "R1 Distill Qwen 1.5B", "R1 Distill Llama 8B"],
)
def test_models_that_use_the_name_of_another_architecture(
    released: dict[str, Any], sizes: tuple[int, ...], rope: RopeConfig, has_bias: bool
) -> None:
    config = parse_config(released)
    assert shapes(config) == sizes
    assert config.context_len == released["max_position_embeddings"]
    assert {(layer.rope, layer.window) for layer in config.layers} == {(rope, 0)}
    assert (config.qkv_bias, config.o_bias, config.tied_head) == (has_bias, False, False)


def test_gpt_oss() -> None:
    config = parse_config(GPT_OSS)
    assert shapes(config) == (24, 64, 8, 64)
    assert [layer.window for layer in config.layers] == [128, 0] * 12
    (rope,) = {layer.rope for layer in config.layers}
    assert rope == RopeConfig(
        150_000, 64, "yarn", 32.0, 4096, truncate=False, attention_factor=1.3465735902799727
    )
    (mixture,) = {layer.feed_forward for layer in config.layers}
    assert isinstance(mixture, MixtureOfExperts)
    assert (mixture.num_experts, mixture.size, mixture.routing.top_k) == (32, 2880, 4)
    assert mixture.routing.normalized
    assert mixture.has_bias
    assert config.sinks
    # Defaults of absent fields are those of transformers.
    absent = {"rope_scaling", "rope_theta", "layer_types", "swiglu_limit", "sliding_window"}
    assert parse_config({k: v for k, v in GPT_OSS.items() if k not in absent}) == config


def test_deepseek_v3_and_r1() -> None:
    config = parse_config(DEEPSEEK_V3)
    assert shapes(config) == (61, 128, 1, 576)
    assert config.latent == LatentAttention(1536, 512, 128, 64, 128, interleaved=True)
    (rope,) = {layer.rope for layer in config.layers}
    assert rope == RopeConfig(1e4, 64, "yarn", 40.0, 4096, attention_factor=1.0)
    assert config.attn_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    mixtures = [layer.feed_forward for layer in config.layers]
    assert mixtures[:3] == [None] * 3
    (mixture,) = set(mixtures[3:])
    assert isinstance(mixture, MixtureOfExperts)
    assert (mixture.num_experts, mixture.size, mixture.shared_size) == (256, 2048, 2048)
    assert mixture.routing == ExpertRouting(8, "sigmoid", True, 2.5, 8, 4, 2)
    assert mixture.has_correction


def test_deepseek_v2_lite() -> None:
    config = parse_config(DEEPSEEK_V2_LITE)
    assert shapes(config) == (27, 16, 1, 576)
    assert config.latent == LatentAttention(0, 512, 128, 64, 128, interleaved=True)
    assert config.attn_scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    mixture = config.layers[1].feed_forward
    assert isinstance(mixture, MixtureOfExperts)
    assert (mixture.num_experts, mixture.size, mixture.shared_size) == (64, 1408, 2816)
    assert mixture.routing == ExpertRouting(6)
    assert not mixture.has_correction


def test_glm_4_7_flash() -> None:
    config = parse_config(GLM_47_FLASH)
    assert shapes(config) == (47, 20, 1, 576)
    assert config.latent == LatentAttention(768, 512, 192, 64, 256, interleaved=True)
    assert (config.norm_eps, config.attn_scale) == (1e-5, 256**-0.5)
    mixture = config.layers[1].feed_forward
    assert isinstance(mixture, MixtureOfExperts)
    assert mixture.routing == ExpertRouting(4, "sigmoid", True, 1.8)
    assert config.layers[0].feed_forward is None


def test_gpt_neox_20b() -> None:
    config = parse_config(GPT_NEOX_20B)
    assert shapes(config) == (44, 64, 64, 96)
    assert config.activation == "gelu_tanh"
    assert {layer.rope for layer in config.layers} == {RopeConfig(1e4, 24)}
    assert config.parallel


def test_gpt2() -> None:
    config = parse_config(GPT2)
    assert shapes(config) == (12, 12, 12, 64)
    assert (config.context_len, config.positions) == (1024, LearnedPositions(1024))
    assert (config.hidden_size, config.ffn_size, config.tied_head) == (768, 3072, True)
    assert (config.norm_eps, config.activation) == (1e-5, "gelu_tanh")
    assert {layer.rope for layer in config.layers} == {None}
    assert parse_config(GPT2 | {"n_inner": 8192}).ffn_size == 8192
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        with pytest.raises(UnsupportedModel, match=f"config field {key}=True is not supported"):
            parse_config(GPT2 | {key: True})


def test_apertus_8b() -> None:
    config = parse_config(APERTUS_8B)
    assert shapes(config) == (32, 32, 8, 128)
    assert (config.qk_norm, config.norm_eps, config.ffn_size) == ("head", 1e-5, 21504)
    without_rope = {key: x for key, x in APERTUS_8B.items() if not key.startswith("rope")}
    assert parse_config(without_rope) == config  # transformers has the same defaults
    unscaled = {"rope_scaling": None, "rope_theta": 1e4}  # of a GGUF file without factors
    assert {layer.rope for layer in parse_config(without_rope | unscaled).layers} == {
        RopeConfig(1e4, 128)
    }
    with pytest.raises(UnsupportedModel, match="config field hidden_act='silu': expected xielu"):
        parse_config(APERTUS_8B | {"hidden_act": "silu"})


def test_bert_and_xlm_roberta() -> None:
    config = parse_config(BGE_SMALL)
    assert shapes(config) == (12, 12, 12, 32)
    assert (config.context_len, config.positions) == (512, LearnedPositions(512, num_types=2))
    assert (config.norm_eps, config.activation, config.gated) == (1e-12, "gelu", False)
    config = parse_config(BGE_M3)
    assert shapes(config) == (24, 16, 16, 64)
    positions = LearnedPositions(8192, num_types=1, padding=1)
    assert config.positions == positions
    assert positions.shapes(1024)[POSITIONS] == (8194, 1024)
    assert (config.context_len, config.norm_eps) == (8192, 1e-5)


def test_modernbert() -> None:
    config = parse_config(GTE_MODERNBERT)
    assert shapes(config) == (22, 12, 12, 64)
    assert [layer.window for layer in config.layers] == ([0, 65, 65] * 8)[:22]
    assert [layer.rope for layer in config.layers[:2]] == [
        RopeConfig(1.6e5, 64),
        RopeConfig(1e4, 64),
    ]
    assert (config.context_len, config.positions, config.norm_bias) == (8192, None, False)


def test_heads_that_score() -> None:
    """A config of two labels states neither their number nor their names."""
    assert parse_config(MS_MARCO_MINI_LM).classifier == Classifier("cls", "tanh", sigmoid=False)
    assert parse_config(BGE_RERANKER_BASE).classifier == Classifier("cls", "tanh")
    assert parse_config(GTE_RERANKER_MODERNBERT).classifier == Classifier(
        "mean", "gelu", dense_bias=False, norm_eps=1e-5
    )
    unnamed = {key: x for key, x in BGE_RERANKER_BASE.items() if key != "id2label"}
    assert parse_config(unnamed | {"num_labels": 1}) == parse_config(BGE_RERANKER_BASE)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "num_labels and id2label are absent"),
        ({"num_labels": 3}, "num_labels gives 3 labels"),
        ({"id2label": {"0": "a", "1": "b"}}, "id2label gives 2 labels"),
    )
    for labels, message in cases:
        with pytest.raises(UnsupportedModel, match=message):
            parse_config(unnamed | labels)


def test_command_r_has_the_context_of_its_tokenizer() -> None:
    """Aya 23 states no such length."""
    config = parse_config(COMMAND_R)
    assert shapes(config) == (40, 64, 64, 128)
    assert config.context_len == 131_072
    aya = {key: value for key, value in COMMAND_R.items() if key != "model_max_length"}
    assert parse_config(aya).context_len == 8192
