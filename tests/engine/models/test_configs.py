"""config.json to ModelConfig: older forms of keys, defaults for absent keys, and clear refusals."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from builders.paged_runner import read_config
from builders.tiny_models import write_tiny
from transformers import GptOssConfig, Ministral3Config

from pdserve.engine.architectures import parse_config
from pdserve.engine.models import UnsupportedModel
from pdserve.engine.models.rope import RopeConfig

YARN = {
    "rope_theta": 5e5,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    archs = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "mixtral", "glm4_moe")
    archs += ("olmo3", "ministral3", "exaone4", "cohere2", "hunyuan_v1_dense", "internlm3")
    return {arch: read_config(write_tiny(folder / arch, arch)) for arch in archs}


def without(config: Mapping[str, Any], *keys: str, **changes: Any) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in keys}
    return copy.deepcopy(kept | changes)


def test_older_rope_keys_have_the_same_meaning(configs: Mapping[str, dict[str, Any]]) -> None:
    new = without(configs["llama"], rope_parameters=YARN)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    old = without(configs["llama"], "rope_parameters", rope_theta=5e5, rope_scaling=scaling)
    assert parse_config(old) == parse_config(new)
    assert parse_config(new).layers[0].rope.attention_factor == pytest.approx(1.1386, abs=1e-4)


def test_rope_defaults_of_gpt_oss_are_those_of_transformers(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A config with only theta keeps it and gets the scaling of the releases."""
    for given, theta, factor in (
        ({}, 150_000, 32),
        ({"rope_theta": 5e4}, 5e4, 32),
        ({"rope_theta": 5e4, "rope_scaling": None}, 5e4, 32),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, 5e4, 1),
        ({"rope_theta": 5e4, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 5e4, 2),
    ):
        with subtests.test(given=given):
            tmp_path = tmp_path_factory.mktemp("case")
            theirs = GptOssConfig(**copy.deepcopy(given)).rope_parameters
            assert (theirs["rope_theta"], theirs.get("factor", 1)) == (theta, factor)
            config = read_config(write_tiny(tmp_path, "gpt_oss"))
            rope = parse_config(without(config, "rope_parameters", **given)).layers[0].rope
            assert rope is not None
            assert (rope.theta, rope.factor) == (theta, factor)


def test_rope_defaults_of_ministral_3_are_those_of_transformers(
    configs: Mapping[str, dict[str, Any]],
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    for given, theta, factor in (
        ({}, 1e6, 16),
        ({"rope_parameters": None}, 1e6, 16),
        ({"rope_theta": 5e4, "rope_scaling": yarn}, 5e4, 4),
        ({"rope_parameters": None, "rope_theta": 5e4, "rope_scaling": yarn}, 5e4, 4),
        ({"rope_parameters": YARN}, 5e5, 4),
    ):
        theirs = Ministral3Config(**copy.deepcopy(given)).rope_parameters
        assert (theirs["rope_theta"], theirs["factor"]) == (theta, factor)
        rope = parse_config(without(configs["ministral3"], "rope_parameters", **given))
        (rope,) = {layer.rope for layer in rope.layers}
        assert rope is not None
        assert (rope.theta, rope.kind, rope.factor) == (theta, "yarn", factor)
        assert getattr(rope, "query_beta", None) == theirs.get("llama_4_scaling_beta")


def test_older_gemma_keys_have_the_same_meaning(configs: Mapping[str, dict[str, Any]]) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    new = without(
        configs["gemma3"],
        rope_parameters={
            "full_attention": {"rope_theta": 9e5, **linear},
            "sliding_attention": {"rope_theta": 7e3, "rope_type": "default"},
        },
    )
    old = without(
        configs["gemma3"],
        "rope_parameters",
        "layer_types",
        "_sliding_window_pattern",
        rope_theta=9e5,
        rope_local_base_freq=7e3,
        rope_scaling=linear,
        sliding_window_pattern=3,
    )
    assert parse_config(old) == parse_config(new)
    kinds = [layer.rope.kind for layer in parse_config(old).layers]
    assert kinds == ["default", "default", "linear", "default"]


def test_absent_keys_get_the_defaults_of_their_architecture(
    configs: Mapping[str, dict[str, Any]],
) -> None:
    mistral = parse_config(without(configs["mistral"], "sliding_window"))
    assert {layer.window for layer in mistral.layers} == {4096}
    assert parse_config(without(configs["gemma3"], "tie_word_embeddings")).tied_head
    assert not parse_config(without(configs["llama"], "tie_word_embeddings")).tied_head
    assert parse_config(without(configs["llama"], "num_key_value_heads")).num_kv_heads == 6
    assert parse_config(without(configs["llama"], "head_dim")).head_dim == 48 // 6
    assert parse_config(without(configs["qwen3"], "head_dim")).layers[0].rope.rotary_dim == 128
    assert (
        parse_config(without(configs["llama"], partial_rotary_factor=0.5)).layers[0].rope.rotary_dim
        == 6
    )
    uneven = without(configs["llama"], partial_rotary_factor=30 / 44) | {"head_dim": 44}
    assert parse_config(uneven).layers[0].rope.rotary_dim == 30, (
        "not 29, although 44 * (30 / 44) < 30"
    )


def test_older_forms_of_window_and_rope_have_the_same_meaning(
    configs: Mapping[str, dict[str, Any]],
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    nested = {"full_attention": {"rope_theta": 7e4, **yarn}}
    nested["sliding_attention"] = {"rope_theta": 7e4, "rope_type": "default"}
    new = without(configs["olmo3"], rope_parameters=nested)
    fields = ("rope_parameters", "layer_types", "rms_norm_eps")
    old = without(configs["olmo3"], *fields, rope_theta=7e4, rope_scaling=yarn)
    assert parse_config(old) == parse_config(new)
    assert [layer.rope.kind for layer in parse_config(old).layers] == ["default"] * 3 + ["yarn"]
    pattern = without(configs["cohere2"], "layer_types", sliding_window_pattern=2)
    layers = [(layer.window, layer.rope is None) for layer in parse_config(pattern).layers]
    assert layers == [(11, False), (0, True)] * 2
    pattern = without(configs["exaone4"], "layer_types", sliding_window_pattern=3)
    layers = [(layer.window, layer.rope is None) for layer in parse_config(pattern).layers]
    assert layers == [(11, False), (11, False), (0, True)]
    scaling = {"type": "dynamic", "alpha": 50.0, "factor": 1.0}
    fields = {"rope_theta": 3e4, "rope_scaling": scaling}
    hunyuan = parse_config(without(configs["hunyuan_v1_dense"], "rope_parameters", **fields))
    assert hunyuan.layers[0].rope == RopeConfig(3e4 * 50.0 ** (20 / 18), 20)
    bias = without(configs["internlm3"], "attention_bias", "mlp_bias", qkv_bias=True, bias=False)
    internlm = parse_config(bias)
    assert (internlm.qkv_bias, internlm.o_bias, internlm.ffn_bias) == (True, False, False)


def test_layers_with_the_same_window_share_a_group(configs: Mapping[str, dict[str, Any]]) -> None:
    groups = parse_config(configs["gemma3"]).kv_groups("bfloat16")
    assert [(group.kind, group.window, group.layers) for group in groups] == [
        ("full", 0, (2,)),
        ("window", 11, (0, 1, 3)),
    ]
    assert groups[0].block_bytes(16) == 2 * 1 * 16 * 20 * 2
    (only,) = parse_config(configs["mistral"]).kv_groups("float32")
    assert (only.kind, only.layers) == ("window", (0, 1, 2))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a new rope": (
        "llama",
        {"rope_parameters": {"rope_type": "spiral", "factor": 2.0}},
        r"'spiral' is not supported; supported: .*llama3, yarn",
    ),
    "dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "factor=None"),
    "dynamic rope of a huge factor": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 1.7e308}},
        "dynamic rope of factor 1.7e",
    ),
    "dynamic rope that shrinks": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 0.5}},
        "dynamic rope of factor 0.5",
    ),
    "one expert in groups": (
        "glm4_moe",
        {"n_routed_experts": 4, "n_group": 4},
        "4 experts cannot be split into 4",
    ),
    "more experts than the groups have": (
        "glm4_moe",
        {"num_experts_per_tok": 4, "topk_group": 1},
        "4 experts per token need more than 1 groups of 3",
    ),
    "experts without end": (
        "mixtral",
        {"num_local_experts": 4096, "num_hidden_layers": 9999},
        "4096 experts in each of 9999 layers",
    ),
    "longrope": (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 6}},
        "long_factor: expected 6 numbers",
    ),
    "llama3 borders": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
            }
        },
        "low_freq_factor",
    ),
    "rope factor": ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor=None"),
    "rotary dims": (
        "llama",
        {"rope_parameters": {"partial_rotary_factor": 1e308}},
        "rope over 24 of 12 dims",
    ),
    "theta": ("llama", {"rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
    "nested rope": (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        "rope_parameters",
    ),
    "rope factors": (
        "llama",
        {"rope_parameters": {"rope_type": "factors", "factors": [1.0]}},
        "expected 6 numbers",
    ),
    "scaled queries without yarn": (
        "ministral3",
        {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
        "llama_4_scaling_beta=0.1: expected yarn over all 20 dims of a head, not default",
    ),
    "scaled queries that are no number": (
        "ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": "x"}},
        "llama_4_scaling_beta='x': expected a finite number",
    ),
    "yarn for all layers of OLMo 3": (
        "olmo3",
        {"rope_parameters": YARN},
        "rope_parameters: OLMo 3 needs yarn under full_attention",
    ),
    "a pattern of windows in letters alone": (
        "exaone4",
        {"layer_types": None, "sliding_window_pattern": "LLLG"},
        "sliding_window_pattern='LLLG': expected an integer",
    ),
    "alpha of rope": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 1e300}},
        r"alpha=1e\+300: expected at most 1e\+06",
    ),
    "activation": ("llama", {"hidden_act": "relu"}, "'relu' is not supported; supported: silu"),
    "heads": ("llama", {"num_attention_heads": 7}, "7 heads are not a multiple of 2"),
    "size": ("llama", {"hidden_size": "48"}, "hidden_size='48'"),
    "negative": ("llama", {"vocab_size": -3}, "vocab_size=-3"),
    "huge": ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "nan": ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    "norm eps": ("llama", {"rms_norm_eps": 1e300}, "rms_norm_eps=1e\\+300: expected at most 1"),
    "layer types": ("gemma3", {"layer_types": ["full_attention"]}, "layer_types"),
    "bidirectional": (
        "gemma3",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention",
    ),
    "soft cap of scores": (
        "gemma3",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping: Gemma 3 has no cap",
    ),
}


def test_unsupported_features_are_refused_by_name(
    subtests: pytest.Subtests, configs: Mapping[str, dict[str, Any]]
) -> None:
    for case in REFUSED:
        with subtests.test(case):
            arch, changes, message = REFUSED[case]
            with pytest.raises(UnsupportedModel, match=message):
                parse_config(configs[arch] | changes)
