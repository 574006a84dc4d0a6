"""Extensions in one file: a part of a layer with its architecture, a weight format, and a backend.

Each one is a file of tests/support/builders that a test imports at run time.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from builders.engine_kit import ask, run, tokens
from builders.paged_runner import PagedRunner, load_decoder
from builders.tiny_models import write_tiny
from safetensors.numpy import load_file, save_file

from pdserve.engine.api import EngineConfig
from pdserve.engine.backends import choose, names, register
from pdserve.engine.build import build_engine
from pdserve.engine.checkpoints import CheckpointError
from pdserve.engine.load import load_model
from pdserve.engine.models import Part, UnsupportedModel
from pdserve.engine.models.parts import Norm
from pdserve.engine.models.torch_parts import TorchLinear, computes, make_part


def load(path: Path, **options: Any) -> Any:
    return load_model(EngineConfig(model=str(path), **options), lambda what, fraction: None)


def test_a_new_part_of_a_layer(tmp_path: Path) -> None:
    import_module("builders.added_part")
    path = write_tiny(tmp_path / "mish", "llama", seed=3, hidden_act="mish")
    prompt = list(range(3, 60))
    model = transformers.LlamaForCausalLM.from_pretrained(path, attn_implementation="eager")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["MishForCausalLM"]}))
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt])).logits[0]
    runner = PagedRunner(load(path, kernels="reference").decoder)
    parts = [runner.step({"x": prompt[a:b]})["x"] for a, b in ((0, 20), (20, 21), (21, 57))]
    torch.testing.assert_close(torch.cat(parts), theirs, atol=1e-4, rtol=0)
    assert theirs.std() > 0.3, "the logits are too flat to compare"
    with pytest.raises(CheckpointError, match="native kernels cannot compute MishGate"):
        load(path)


def test_a_part_is_computed_by_one_class() -> None:
    class Unheard(Part):
        pass

    nothing: Any = None
    with pytest.raises(UnsupportedModel, match="reference kernels cannot compute Unheard"):
        make_part(Unheard(), nothing)
    with pytest.raises(ValueError, match="part Norm is registered twice"):
        computes(Norm)(TorchLinear)


def test_a_new_weight_format_of_three_parts(tmp_path: Path) -> None:
    added = import_module("builders.added_format")
    # Two folders: the parts as stored, and the values that they represent.
    sizes = {"intermediate_size": 96, "head_dim": 8}  # rows consist of whole groups
    stored, rounded = (write_tiny(tmp_path / n, "llama", **sizes) for n in ("stored", "rounded"))
    tensors = load_file(stored / "model.safetensors")
    parts, values = {}, {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            made = added.quantized(tensor)
            prefix = name.removesuffix("weight")
            parts |= {prefix + part: array for part, array in made.items()}
            raw = added.RawTensor(made, added.Grouped8.name, tensor.shape)
            values[name] = added.Grouped8().unpack(raw)
            assert np.abs(values[name] - tensor).max() < 0.05
        else:
            parts[name] = values[name] = tensor
    assert len(parts) == len(tensors) + 2 * 7 * 3
    save_file(parts, stored / "model.safetensors")
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "grouped", "group_size": 16}
    (stored / "config.json").write_text(json.dumps(config))
    save_file(values, rounded / "model.safetensors")
    prompt = {"x": list(range(3, 40))}
    exact = PagedRunner(load_decoder(rounded)).step(prompt)["x"]
    for options in ({"kernels": "reference"}, {"kernels": "reference", "weights": "quantized"}, {}):
        loaded = load(stored, kv_dtype="float32", **options)
        found = PagedRunner(loaded.decoder).step(prompt)["x"]
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=0)
        assert loaded.card.quantization == added.Grouped8.name
    name = next(name for name in parts if name.endswith("scales"))
    save_file({**parts, name: parts[name][:, 1:].copy()}, stored / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"quantized tensor .*: scales or zeros do not fit"):
        load(stored)


def test_a_new_backend(tmp_path: Path) -> None:
    added = import_module("builders.added_backend")
    path = write_tiny(tmp_path, "llama")
    config = EngineConfig(model=str(path), kernels="counting", kv_tokens=640)
    engine, _ = build_engine(config)
    assert engine.kv.spec.groups[0].dtype == "float16"
    answer = tokens(run(engine, ask("a", [5, 7, 30], max_tokens=4)))
    assert answer == {("a", 0): [31, 32, 33, 34]}
    with pytest.raises(ValueError, match="twice"):
        register(added.CountingBackend)
    with pytest.raises(ValueError, match="--kv-dtype int8 needs the native kernels, which --kern"):
        load(path, kernels="counting", kv_dtype="int8")
    with pytest.raises(
        ValueError, match=r"--kernels none is not supported; supported: auto, .*native, "
    ):
        load(path, kernels="none")


def test_each_file_in_the_folder_is_a_backend() -> None:
    folder = Path(import_module("pdserve.engine.backends").__path__[0])
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    devices = {"native": "cpu", "cuda": "cuda", "reference": "cpu"}
    assert files == devices.keys() <= set(names())
    for name, device in devices.items():
        assert choose(EngineConfig(kernels=name, device=device)).name == name
