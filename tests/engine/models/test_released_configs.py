"""What the config.json of releases says is read as meant, under whichever architecture they go."""

from typing import Any

import pytest

from pdserve.engine.architectures import parse_config
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.experts import MixtureOfExperts
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


def shapes(config: ModelConfig) -> tuple[int, ...]:
    return config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim


@pytest.mark.parametrize(
    ("released", "sizes", "rope", "has_bias"),
    [
        (YI, (32, 32, 4, 128), RopeConfig(5e6, 128), False),
        (QWQ, (64, 40, 8, 128), RopeConfig(1e6, 128), True),
        (R1_QWEN, (28, 12, 2, 128), RopeConfig(1e4, 128), True),
        (
            R1_LLAMA,
            (32, 32, 8, 128),
            RopeConfig(5e5, 128, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
            False,
        ),
    ],
    ids=["Yi 1.5 6B", "QwQ 32B", "R1 Distill Qwen 1.5B", "R1 Distill Llama 8B"],
)
def test_models_that_go_by_another_name(
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
    # What a file leaves out is as transformers has it.
    absent = {"rope_scaling", "rope_theta", "layer_types", "swiglu_limit", "sliding_window"}
    assert parse_config({k: v for k, v in GPT_OSS.items() if k not in absent}) == config
