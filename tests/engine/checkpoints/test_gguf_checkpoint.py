"""GGUF files written by the gguf package hold the same model as the directory they are made
from."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from builders.tiny_models import ARCHITECTURES, add_mtp, write_tiny
from builders.viewed import assert_same_tensors
from builders.write_gguf import write_gguf
from safetensors.torch import load_file, save_file

from pdserve.engine.api import EngineConfig
from pdserve.engine.architectures import parse_config
from pdserve.engine.checkpoints import CheckpointError
from pdserve.engine.checkpoints.gguf import GgufCheckpoint
from pdserve.engine.checkpoints.gguf.checkpoint import end_ids, gguf_text_files
from pdserve.engine.checkpoints.gguf.reader import GgufReader
from pdserve.engine.load import find_mapping, load_model, open_checkpoint
from pdserve.engine.models import ModelConfig

# The format cannot express gemma's attention scale.
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 20},
    "gemma3": {"query_pre_attn_scalar": 20},
    "smollm3": {"no_rope_layer_interval": 4},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, OWN.get(arch, {})) for arch in ARCHITECTURES},
    "stablelm-head-norms": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "cohere-head-norms": ("cohere", {"use_qk_norm": True}),
}
ROPE: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 128,
    },
}


def config_of(path: Path) -> ModelConfig:
    return parse_config(open_checkpoint(path).hf_config)


def test_same_config_and_tensors(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for variant, (arch, own) in VARIANTS.items():
        with subtests.test(variant):
            tmp_path = tmp_path_factory.mktemp("case")
            folder = write_tiny(tmp_path / "hf", arch, **own)
            scores = {"deepseek2.expert_gating_func": 2} if arch == "glm4_moe_lite" else {}
            gguf = write_gguf(folder, tmp_path / "model.gguf", **scores)
            assert_same_tensors(gguf, folder)
            got, expected = config_of(gguf), config_of(folder)
            if arch in ("mistral", "ministral", "internlm3"):  # written as llama, without windows
                assert got.architecture == "LlamaForCausalLM"
                continue
            if arch == "glm4_moe_lite":  # written as DeepSeek
                assert got.architecture == "DeepseekV3ForCausalLM"
                expected = replace(expected, architecture=got.architecture)
            assert got.norm_eps == pytest.approx(expected.norm_eps)
            for field in ModelConfig.__dataclass_fields__:
                if field != "norm_eps":
                    assert getattr(got, field) == getattr(expected, field), field


def test_names_that_two_models_share(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A file of a Mistral Small 3 says mistral3 like that of a Ministral 3, without windows and
    scaled queries; those of Qwen with vision have the tensors of the text model alone."""
    sections = {"rope.dimension_sections": [2, 3, 3, 0]}
    for inner, arch, name, keys in (
        ("llama", "mistral3", "LlamaForCausalLM", {}),
        ("qwen2", "qwen2vl", "Qwen2VLForConditionalGeneration", sections),
        (
            "qwen3",
            "qwen3vl",
            "Qwen3VLForConditionalGeneration",
            {**sections, "n_deepstack_layers": 1},
        ),
    ):
        with subtests.test(arch):
            tmp_path = tmp_path_factory.mktemp("case")
            folder = write_tiny(tmp_path / "hf", inner)
            metadata = {f"{arch}.{key}": value for key, value in keys.items()}
            gguf = write_gguf(folder, tmp_path / "m.gguf", arch=arch, **metadata)
            got, expected = config_of(gguf), config_of(folder)
            assert got.architecture == name
            assert got.layers == expected.layers
            assert (got.qk_norm, got.qkv_bias) == (expected.qk_norm, expected.qkv_bias)
            assert_same_tensors(gguf, folder)


def test_q_k_and_v_of_chatglm_may_be_fused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "glm")
    shutil.copytree(folder, tmp_path / "fused")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"]
        tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    save_file(tensors, tmp_path / "fused/model.safetensors")
    gguf = write_gguf(tmp_path / "fused", tmp_path / "m.gguf")
    assert "model.layers.0.self_attn.qkv_proj.weight" in open_checkpoint(gguf).names()
    assert_same_tensors(gguf, folder)
    assert config_of(gguf) == replace(config_of(folder), norm_eps=config_of(gguf).norm_eps)
    load_model(EngineConfig(model=str(gguf)), lambda *_: None)


def test_a_sequential_stablelm_is_recognized_by_its_norms(tmp_path: Path) -> None:
    """The converter writes use_parallel_residual = true for a config that lacks the field, like
    that of the 3B model."""
    folder = write_tiny(tmp_path / "hf", "stablelm")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("use_parallel_residual") is False
    (folder / "config.json").write_text(json.dumps(config))
    key = {"stablelm.use_parallel_residual": True}
    got = config_of(write_gguf(folder, tmp_path / "m.gguf", **key))
    assert not got.parallel
    assert got.norms == config_of(folder).norms


def test_a_ministral_3_file_may_scale_nothing(tmp_path: Path) -> None:
    yarn = {**ROPE["yarn"], "llama_4_scaling_beta": 0.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    folder = write_tiny(tmp_path / "hf", "ministral3", rope_parameters=yarn)
    got = config_of(write_gguf(folder, tmp_path / "m.gguf"))
    assert got.architecture == "Ministral3ForCausalLM"
    assert got.layers == config_of(folder).layers


def test_stored_blocks_with_permuted_rows(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for kind in ("F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"):
        with subtests.test(kind):
            tmp_path = tmp_path_factory.mktemp("case")
            sizes: dict[str, Any] = {
                "hidden_size": 256,
                "head_dim": 64,
                "num_hidden_layers": 2,
                "intermediate_size": 512,
            }
            folder = write_tiny(tmp_path / "hf", "llama", num_attention_heads=4, **sizes)
            gguf = write_gguf(folder, tmp_path / "model.gguf", kind, rounded=tmp_path / "rounded")
            layout = open_checkpoint(gguf).layout("model.layers.0.self_attn.q_proj.weight")
            assert layout == (kind, (256, 256))
            assert_same_tensors(gguf, tmp_path / "rounded")


def test_rope_scaling(subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory) -> None:
    for kind in ROPE:
        with subtests.test(kind):
            tmp_path = tmp_path_factory.mktemp("case")
            folder = write_tiny(tmp_path / "hf", "qwen2", rope_parameters=ROPE[kind])
            got = config_of(write_gguf(folder, tmp_path / "model.gguf"))
            assert got.layers == config_of(folder).layers
            assert got.layers[0].rope.kind == kind


def test_rope_scaling_of_olmo_3_and_hunyuan(tmp_path: Path) -> None:
    """OLMo 3's files have config.json's attention factor, those of Hunyuan a theta that includes
    alpha."""
    scaled = {**ROPE["yarn"], "attention_factor": 1.25}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    nested = {"full_attention": scaled, "sliding_attention": plain}
    folder = write_tiny(tmp_path / "olmo3", "olmo3", rope_parameters=nested)
    got = config_of(write_gguf(folder, tmp_path / "olmo3.gguf"))
    assert got.layers == config_of(folder).layers
    rope = got.layers[3].rope
    assert rope is not None
    assert rope.attention_factor == 1.25
    alpha = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
    folder = write_tiny(tmp_path / "hunyuan", "hunyuan_v1_dense", rope_parameters=alpha)
    (rope,) = {layer.rope for layer in config_of(folder).layers}
    (stored,) = {x.rope for x in config_of(write_gguf(folder, tmp_path / "hunyuan.gguf")).layers}
    assert rope is not None
    assert stored is not None
    assert stored.theta == pytest.approx(rope.theta)
    assert replace(stored, theta=rope.theta) == rope


def test_internlm_3_may_have_biases_on_q_k_and_v_alone(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "internlm3")
    config = json.loads((folder / "config.json").read_text())
    other = {"attention_bias": None, "mlp_bias": None, "qkv_bias": True, "bias": False}
    (folder / "config.json").write_text(json.dumps(config | other))
    tensors = load_file(folder / "model.safetensors")
    without = ("o_proj.bias", "gate_proj.bias", "up_proj.bias", "down_proj.bias")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(without)}
    save_file(kept, folder / "model.safetensors")
    gguf = write_gguf(folder, tmp_path / "m.gguf")
    assert_same_tensors(gguf, folder)
    load_model(EngineConfig(model=str(gguf)), lambda *_: None)


def test_llama3_rope_is_stored_as_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500.0,
    }
    folder = write_tiny(tmp_path / "hf", "llama", rope_parameters=scaling)
    rope = config_of(write_gguf(folder, tmp_path / "model.gguf")).layers[0].rope
    assert rope.kind == "factors"
    assert len(rope.factors) == 6
    assert min(rope.factors) == 1
    assert max(rope.factors) == 8


def test_longrope_is_stored_as_two_tensors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + n / 8 for n in range(12)],
        "long_factor": [1.0 + n for n in range(12)],
    }
    own = {"rope_parameters": scaling, "original_max_position_embeddings": 64}
    folder = write_tiny(tmp_path / "hf", "phi3", **own)
    rope = config_of(write_gguf(folder, tmp_path / "model.gguf")).layers[0].rope
    expected = config_of(folder).layers[0].rope
    assert rope is not None
    assert expected is not None
    assert rope.attention_factor == pytest.approx(expected.attention_factor)
    assert replace(rope, attention_factor=expected.attention_factor) == expected


def test_a_gpt_oss_file_without_rope_scaling_gets_none(tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 5e4}
    folder = write_tiny(tmp_path / "hf", "gpt_oss", rope_parameters=plain)
    config = config_of(write_gguf(folder, tmp_path / "m.gguf"))
    assert config.layers == config_of(folder).layers
    rope = config.layers[0].rope
    assert rope is not None
    assert (rope.theta, rope.kind) == (5e4, "default")
    metadata = dict(GgufReader(tmp_path / "m.gguf").metadata)
    del metadata["gpt-oss.rope.freq_base"]  # llama.cpp then uses 10,000
    assert find_mapping("gpt-oss")[1].config(metadata)["rope_theta"] == 10_000


def test_the_learned_activations_of_apertus_are_metadata(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "apertus")
    file = write_gguf(folder, tmp_path / "m.gguf")
    load_model(EngineConfig(model=str(file)), lambda *_: None)
    key = b"xielu.alpha_p"
    file.write_bytes(file.read_bytes().replace(key, key.replace(b"p", b"q")))
    with pytest.raises(CheckpointError, match=r"missing 3 tensors: .*0\.mlp\.act_fn\.alpha_p"):
        load_model(EngineConfig(model=str(file)), lambda *_: None)


def test_multi_token_prediction_layers_are_left_out(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for arch in ("glm4_moe", "deepseek_v3", "deepseek_v2"):
        with subtests.test(arch):
            tmp_path = tmp_path_factory.mktemp("case")
            folder = write_tiny(tmp_path / "hf", arch)
            before = config_of(folder)
            add_mtp(folder)
            file = write_gguf(folder, tmp_path / "m.gguf")
            assert "blk.3.nextn.eh_proj.weight" in GgufReader(file).tensors
            assert config_of(file).layers == config_of(folder).layers == before.layers
            assert_same_tensors(file, folder)
            load_model(EngineConfig(model=str(file)), lambda *_: None)


@pytest.mark.parametrize("has_mtp", [False, True])
def test_glm_flash_is_recognized_by_its_size(
    subtests: pytest.Subtests, has_mtp: bool, tmp_path: Path
) -> None:
    """Its files do not say that scores are sigmoids. The vocabulary size is in a key or is the
    length of the token list."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
    folder = write_tiny(
        tmp_path / "hf", "glm4_moe_lite", vocab_size=154_880, num_hidden_layers=47, **sizes
    )
    if has_mtp:
        add_mtp(folder)
    file = write_gguf(folder, tmp_path / "m.gguf")
    reader = GgufReader(file)
    assert "deepseek2.expert_gating_func" not in reader.metadata
    for has_size in (False, True):
        with subtests.test(has_size=has_size):
            metadata = dict(reader.metadata)
            if not has_size:
                del metadata["deepseek2.vocab_size"]
            config = find_mapping("deepseek2")[1].config(metadata)
            assert config["architectures"] == ["Glm4MoeLiteForCausalLM"]
            assert config["scoring_func"] == "sigmoid"
    assert config_of(file).layers == config_of(folder).layers


def test_a_split_file_is_opened_by_any_of_its_parts(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    first = write_gguf(folder, tmp_path / "model.gguf", max_tensors_per_part=10)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) == 3
    assert first == parts[0]
    assert_same_tensors(parts[-1], folder)
    assert open_checkpoint(first).files == tuple(map(str, parts))
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 parts .*00002-of-00003"):
        open_checkpoint(first)


def test_a_part_with_a_wrong_number_is_detected(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    write_gguf(folder, tmp_path / "model.gguf", max_tensors_per_part=10)
    one, two, _ = sorted(tmp_path.glob("model-*.gguf"))
    held = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(held)
    with pytest.raises(CheckpointError, match="its metadata says part"):
        open_checkpoint(one)


def test_a_tied_head_is_detected(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "qwen2")
    checkpoint = open_checkpoint(write_gguf(folder, tmp_path / "model.gguf"))
    assert checkpoint.hf_config["tie_word_embeddings"]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        checkpoint.tensor("lm_head.weight")


def test_text_files(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    got = open_checkpoint(write_gguf(folder, tmp_path / "model.gguf")).text_files()
    expected = open_checkpoint(folder).text_files()
    assert (got.eos_ids, got.bos_id, got.adds_bos) == ((258,), 256, True)
    assert (expected.eos_ids, expected.bos_id, expected.adds_bos) == ((258,), 256, True)
    assert got.chat_template == expected.chat_template


def test_templates_and_tokens_by_name(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    metadata = dict(GgufReader(write_gguf(folder, tmp_path / "model.gguf")).metadata)
    metadata["tokenizer.chat_template"] = "{{ pad_token }}"
    metadata["tokenizer.chat_template.tool_use"] = "T"
    metadata["tokenizer.chat_template.none"] = 7
    metadata["tokenizer.ggml.padding_token_id"] = 257
    source = gguf_text_files(metadata).chat_template
    pad = metadata["tokenizer.ggml.tokens"][257]
    assert jinja2.Template(source).render() == pad
    assert jinja2.Template(source).render(tools=[1]) == "T"


def test_the_end_of_turn_token_of_the_template_is_an_eos_token(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama", eos_token_id=257)
    text = open_checkpoint(write_gguf(folder, tmp_path / "model.gguf")).text_files()
    assert text.eos_ids == (257, 258)  # <|im_end|> is 258


def test_the_eos_token_comes_first_among_the_end_tokens(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    metadata = GgufReader(write_gguf(folder, tmp_path / "model.gguf")).metadata
    ends = {f"tokenizer.ggml.{kind}_token_id": at for kind, at in (("eos", 258), ("eot", 3))}
    assert gguf_text_files({**metadata, **ends}).eos_ids == (258, 3)


def test_end_tokens_are_found_by_their_text_as_in_llama_cpp(subtests: pytest.Subtests) -> None:
    """They are added to those that the file names; a template need not contain them."""
    for there, also in (
        ("<|im_end|> <|endoftext|> <|repo_name|>", "<|im_end|> <|endoftext|> <|repo_name|>"),
        ("<|end|> <|endoftext|>", "<|end|> <|endoftext|>"),
        ("<|end|> <|return|> <|call|>", "<|return|> <|call|>"),
        ("<|end|> <|flush|> <|calls|>", "<|flush|> <|calls|>"),
        ("</s> <turn|> <|tool_response>", "<turn|> <|tool_response>"),
        ("</s> [PAD7]", "</s>"),
    ):
        with subtests.test(there=there, also=also):
            tokens = {text: 10 + n for n, text in enumerate(there.split())}
            found = end_ids({"tokenizer.ggml.eos_token_id": 3}, tokens.get)
            assert found[0] == 3
            assert {id for id in found[1:] if id is not None} == {
                tokens[text] for text in also.split()
            }


def test_an_unsupported_key_that_may_change_results_is_refused(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for metadata in (
        {"llama.attention.scale": 0.5},
        {"llama.logit_scale": 2.0},
        {"llama.attention.sliding_window": 64},
        {"llama.attn_logit_softcapping": 50.0},
        {"qwen2.expert_count": 8},
        {"llama.something.new": "x"},
    ):
        with subtests.test(metadata=metadata):
            tmp_path = tmp_path_factory.mktemp("case")
            (key,) = metadata
            folder = write_tiny(tmp_path / "hf", key.partition(".")[0])
            gguf = write_gguf(folder, tmp_path / "model.gguf", **metadata)
            with pytest.raises(CheckpointError, match=f"not supported: .*{key}"):
                open_checkpoint(gguf)


def test_the_whole_head_rotates_by_default(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In contrast, half of the head rotates if config.json does not say otherwise."""
    for arch in ("glm4", "glm4_moe"):
        with subtests.test(arch):
            tmp_path = tmp_path_factory.mktemp("case")
            folder = write_tiny(tmp_path / "hf", arch)
            gguf = write_gguf(folder, tmp_path / "model.gguf")
            half = config_of(gguf).layers[0].rope
            gguf.write_bytes(
                gguf.read_bytes().replace(b".rope.dimension_count", b"_rope.dimension_count")
            )
            whole = config_of(gguf).layers[0].rope
            assert half is not None
            assert whole is not None
            assert (half.rotary_dim, whole.rotary_dim) == (12, 24)


def test_experts_with_another_score_function_are_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "qwen3_moe")
    gguf = write_gguf(folder, tmp_path / "model.gguf", **{"qwen3moe.expert_gating_func": 2})
    with pytest.raises(CheckpointError, match=r"expert_gating_func is 2: expected softmax"):
        open_checkpoint(gguf)


def test_keys_that_do_not_change_results_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    harmless = {"llama.expert_count": 0, "llama.rope.scaling.finetuned": False}
    open_checkpoint(write_gguf(folder, tmp_path / "model.gguf", **harmless))


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    gguf = write_gguf(folder, tmp_path / "model.gguf")
    data = gguf.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1)
    gguf.write_bytes(data)
    with pytest.raises(
        CheckpointError,
        match=r"architecture 'mamba'; known architectures: apertus, arcee, bert, chatglm, cohere2",
    ):
        open_checkpoint(gguf)


def test_a_tensor_without_a_mapping_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    gguf = write_gguf(folder, tmp_path / "model.gguf")
    gguf.write_bytes(gguf.read_bytes().replace(b"blk.1.ffn_up", b"blk.1.ffn_xx", 1))
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_xx\.weight is not known for llama"):
        open_checkpoint(gguf)


def test_gguf_checkpoint_takes_its_mapping_from_the_caller(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    gguf = write_gguf(folder, tmp_path / "model.gguf")

    def nothing(arch: str) -> tuple[str, object]:
        raise CheckpointError(f"no mapping for {arch}")

    with pytest.raises(CheckpointError, match="no mapping for llama"):
        GgufCheckpoint(gguf, nothing)  # type: ignore[arg-type]
