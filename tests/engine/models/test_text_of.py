"""Text models from multimodal checkpoints, under both names that transformers has used."""

import json
from pathlib import Path

import pytest
import torch
from builders.paged_runner import PagedRunner, load_decoder, read_config
from builders.tiny_models import MULTIMODAL, write_tiny
from safetensors.torch import load_file, save_file

from pdserve.engine.architectures import parse_config
from pdserve.engine.models import UnsupportedModel


def newer(name: str) -> str:
    """Return the name that transformers uses since 4.52."""
    if name.startswith(("model.language_model.", "model.visual.", "lm_head.")):
        return name
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    for older in ("language_model.model.", "model."):
        if name.startswith(older):
            return name.replace(older, "model.language_model.", 1)
    return f"model.{name}"


@pytest.mark.parametrize("arch", MULTIMODAL)
def test_newer_names_give_the_same_model(arch: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, arch, tie_word_embeddings=False)
    tokens = {"x": list(range(5, 60))}
    older = PagedRunner(load_decoder(path)).step(tokens)["x"]
    stored = load_file(path / "model.safetensors")
    renamed = {newer(name): held for name, held in stored.items()}
    has_older_names = arch != "qwen3_vl"
    assert (renamed.keys() != stored.keys()) == has_older_names
    save_file(renamed, path / "model.safetensors")
    assert torch.equal(PagedRunner(load_decoder(path)).step(tokens)["x"], older)


def test_first_releases_of_qwen_have_the_fields_of_the_text_model_outside(tmp_path: Path) -> None:
    config = read_config(write_tiny(tmp_path, "qwen2_5_vl"))
    text = dict(config["text_config"])
    del text["model_type"], text["rope_parameters"]
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    flat = {**text, "rope_scaling": scaling, "rope_theta": 1e4, "vision_config": {}}
    flat |= {key: config[key] for key in ("architectures", "tie_word_embeddings")}
    assert parse_config(flat) == parse_config(config)
    gemma = {"architectures": ["Gemma3ForConditionalGeneration"]}
    with pytest.raises(UnsupportedModel, match=r"text model of Gemma3ForConditional.* is None"):
        parse_config(gemma)


def test_an_unsupported_text_model_is_refused_by_name(tmp_path: Path) -> None:
    config = read_config(write_tiny(tmp_path, "mistral3"))
    config["text_config"]["model_type"] = "mistral4"
    expected = r"text model of Mistral3.* is 'mistral4': expected mistral or ministral3"
    with pytest.raises(UnsupportedModel, match=expected):
        parse_config(config)
    with pytest.raises(UnsupportedModel, match="text_config=7: expected a table"):
        parse_config(config | {"text_config": 7})


def test_defaults_of_a_gemma_config_are_those_of_transformers(tmp_path: Path) -> None:
    """The 4B release specifies six fields of its text model."""
    path = write_tiny(tmp_path, "gemma3_multimodal")
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read_config(path)
    del config["tie_word_embeddings"]
    (path / "config.json").write_text(json.dumps(config | {"text_config": text}))
    parsed = parse_config(read_config(path))
    assert (parsed.vocab_size, parsed.num_heads, parsed.num_kv_heads) == (262_208, 8, 4)
    assert (parsed.head_dim, parsed.context_len, parsed.tied_head) == (256, 131_072, True)
    ropes = [layer.rope.kind for layer in parsed.layers if layer.rope]
    assert ropes == (["default"] * 5 + ["linear"]) * 5 + ["default"] * 4
