"""Requirements for every registered architecture, and for one that is added at run time as a
file."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders.paged_runner import PagedRunner, load_decoder, read_config
from builders.tiny_encoder import ENCODERS, write_encoder, write_scorer
from builders.tiny_models import ARCHITECTURES, MULTIMODAL, write_tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine import architectures as registry
from pdserve.engine.api import EngineConfig
from pdserve.engine.architectures import find_spec, known_specs, parse_config, register
from pdserve.engine.load import load_model, open_checkpoint
from pdserve.engine.models import ModelSpec, UnsupportedModel, tensor_shapes

SPECS = {spec.architectures[0]: spec for spec in known_specs()}
JUNK = st.sampled_from(
    (
        None,
        -1,
        0,
        1,
        7,
        2**40,
        1.5,
        float("nan"),
        float("inf"),
        "x",
        "",
        True,
        [],
        [1],
        {},
        {"a": 1},
    )
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return a tiny model of each architecture, by class name."""
    folder = tmp_path_factory.mktemp("models")
    archs = (*ARCHITECTURES, *MULTIMODAL)
    paths = [write_tiny(folder / arch, arch, max_shard_size="30KB") for arch in archs]
    paths += [write_encoder(folder / arch, arch) for arch in ENCODERS]
    paths += [write_scorer(folder / f"{arch}-scorer", arch) for arch in ENCODERS]
    paths += [
        write_tiny(folder / f"{arch}-scorer", arch, head="ForSequenceClassification", num_labels=1)
        for arch in ("llama", "qwen2", "qwen3")
    ]
    return {name: path for path in paths for name in read_config(path)["architectures"]}


def test_conformance(subtests: pytest.Subtests, models: Mapping[str, Path]) -> None:
    """Names and shapes are those of Hugging Face, every layer has a cache, and logits do not depend
    on chunk borders."""
    for name in SPECS:
        with subtests.test(name):
            assert name in models, f"tests/support/builders has no tiny {name}"
            path = models[name]
            config = SPECS[name].parse(read_config(path))
            assert config.architecture == name
            checkpoint = SPECS[name].view(open_checkpoint(path), config)
            stored = {key: checkpoint.layout(key).shape for key in checkpoint.names()}
            assert tensor_shapes(config) == stored
            decoder = load_decoder(path)
            grouped = sorted(n for group in decoder.kv_groups for n in group.layers)
            assert grouped == list(range(config.num_layers))
            if config.encoder:
                continue  # tests/engine/test_encoders.py
            tokens = list(range(5, 45))
            whole = PagedRunner(decoder).step({"x": tokens})["x"]
            pieces = PagedRunner(decoder, block_size=16)
            parts = [
                pieces.step({"x": tokens[a:b]})["x"]
                for a, b in ((0, 1), (1, 18), (18, 19), (19, 40))
            ]
            torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=0)
            assert whole.isfinite().all()


def test_a_broken_config_is_refused_or_read_but_never_crashes(
    subtests: pytest.Subtests, models: Mapping[str, Path]
) -> None:
    for name in SPECS:
        with subtests.test(name):
            assert num_refused(SPECS[name], read_config(models[name])) > 3


def num_refused(spec: ModelSpec, whole: dict[str, Any]) -> int:
    """Return how many of 20 broken configs are refused; the others are accepted."""
    good = whole.get("text_config", whole)
    keys = [*sorted(set(good) - {"architectures"}), "rope_scaling", "rope_theta"]
    refused = 0

    @given(st.dictionaries(st.sampled_from(keys), JUNK, min_size=1, max_size=3))
    @settings(max_examples=20)
    def check(changes: dict[str, Any]) -> None:
        nonlocal refused
        try:
            changed = good | changes
            config = spec.parse(changed if good is whole else whole | {"text_config": changed})
        except UnsupportedModel:
            refused += 1
        else:
            assert config.num_layers >= 1

    check()
    return refused


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    for config in ({"architectures": ["MambaForCausalLM"]}, {}, {"architectures": None}):
        with pytest.raises(UnsupportedModel) as caught:
            parse_config(config)
        assert all(name in str(caught.value) for name in SPECS)
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        find_spec({"architectures": ["MambaForCausalLM"]})


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the registry after the test."""
    monkeypatch.setattr(registry, "_specs", dict(registry._specs))


@pytest.mark.usefixtures("restored")
def test_a_name_can_be_registered_only_once() -> None:
    llama = find_spec({"architectures": ["LlamaForCausalLM"]})
    register(llama)
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        register(ModelSpec(("OtherForCausalLM", "LlamaForCausalLM"), llama.parse))
    with pytest.raises(UnsupportedModel):
        find_spec({"architectures": ["OtherForCausalLM"]})


STARCODER2 = '''
"""StarCoder 2: layer norms, a plain feed-forward and biases everywhere, a window on all layers."""

from pdserve.engine.architectures import register
from pdserve.engine.checkpoints.tensor_remap import View, renamed
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.hf_config import HfConfig, positive
from pdserve.engine.models.hf_config import (
    num_layers, plain_layers, sliding_window, standard,
)
from pdserve.engine.models.spec import ModelSpec


def parse(hf: HfConfig) -> ModelConfig:
    bias = bool(hf.get("use_bias", True))
    return standard(
        {"hidden_act": "gelu_pytorch_tanh", **hf},
        layers=plain_layers(hf, [sliding_window(hf)] * num_layers(hf)),
        norm_kind="layer",
        norm_bias=True,
        norm_eps=positive(hf, "norm_epsilon", 1e-5),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        ffn_bias=bias,
    )


def stored(config: ModelConfig) -> dict[str, View]:
    names = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
    views: dict[str, View] = {}
    for n in range(config.num_layers):
        views |= renamed(f"model.layers.{n}.", names)
    return views


register(ModelSpec(("Starcoder2ForCausalLM",), parse, stored=stored))
'''


@pytest.mark.usefixtures("restored")
def test_an_architecture_is_added_at_run_time_as_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path / "model", "starcoder2")
    with pytest.raises(UnsupportedModel, match="Starcoder2ForCausalLM"):
        parse_config(read_config(path))
    file = tmp_path / "starcoder2.py"
    file.write_text(STARCODER2)
    module_spec = importlib.util.spec_from_file_location("added_starcoder2", file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module_spec.loader.exec_module(importlib.util.module_from_spec(module_spec))

    config = EngineConfig(model=str(path), kv_dtype="float32")
    loaded = load_model(config, lambda what, fraction: None)
    prompt = list(range(3, 40))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt])).logits[0]
        generated = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )[0, len(prompt) :]
    runner = PagedRunner(loaded.decoder)
    logits = runner.step({"x": prompt})["x"]
    torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < 12:
        tokens.append(int(runner.step({"x": tokens[-1:]})["x"].argmax()))
    assert tokens == generated.tolist()
