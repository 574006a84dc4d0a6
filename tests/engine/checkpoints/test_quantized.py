"""Quantized checkpoints: what is read equals what their tools mean, on every backend."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import ask, run, tokens
from paged_runner import PagedRunner, load_decoder
from quantized import Quantized, awq, compressed, fp8, gptq, write_quantized
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.build import build_engine
from pdserve.engine.checkpoints import quantization
from pdserve.engine.checkpoints.source import CheckpointError
from pdserve.engine.load import load_model, open_checkpoint
from pdserve.engine.weights.unpack import unpack

INT, FLOAT = {"type": "int"}, {"type": "float"}
HOW: dict[str, Quantized] = {
    "gptq 4 bits": gptq(4, 32),
    "gptq 4 bits, symmetric": gptq(4, 64, symmetric=True),
    "gptq 4 bits, one group": gptq(4, -1),
    "gptq 4 bits, ordered": gptq(4, 32, ordered=True),
    "gptq 4 bits, short group": gptq(4, 128),
    "gptq 8 bits": gptq(8, 64),
    "gptq 8 bits, symmetric, ordered": gptq(8, 32, symmetric=True, ordered=True),
    "gptq 4 bits, version 2": gptq(4, 32, v2=True),
    "awq": awq(32),
    "awq, one group": awq(-1),
    "fp8 of a tensor": fp8("tensor"),
    "fp8 of outputs": fp8("output"),
    "fp8 of blocks": fp8("block"),
    "compressed int4": compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "compressed int4, zeros": compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "compressed int4, ordered": compressed(
        "pack-quantized", ordered=True, num_bits=4, strategy="group", group_size=32
    ),
    "compressed int4 of outputs": compressed("pack-quantized", num_bits=4, strategy="channel"),
    "compressed int8": compressed("pack-quantized", num_bits=8, strategy="group", group_size=32),
    "compressed int8 of outputs": compressed("int-quantized", num_bits=8, strategy="channel"),
    "compressed fp8 of a tensor": compressed(
        "float-quantized", num_bits=8, strategy="tensor", **FLOAT
    ),
    "compressed fp8 of outputs": compressed(
        "float-quantized", num_bits=8, strategy="channel", **FLOAT
    ),
    "compressed nvfp4": compressed(
        "nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16, **FLOAT
    ),
    "compressed mxfp4": compressed(
        "mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32, **FLOAT
    ),
}
# Rows of whole groups; one input is no multiple of 128.
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "head_dim": 64,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}
PROMPT = list(range(3, 60))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("plain") / "model", "llama", **SIZES)


@pytest.fixture(params=HOW)
def checkpoint(
    request: pytest.FixtureRequest, source: Path, tmp_path: Path
) -> tuple[str, Path, Path]:
    """(how, the folder of the quantized model, that of its values)."""
    stored, rounded = tmp_path / "stored", tmp_path / "rounded"
    write_quantized(source, stored, rounded, HOW[request.param])
    return request.param, stored, rounded


def test_values_and_tokens_are_those_of_the_dequantized_copy(
    checkpoint: tuple[str, Path, Path],
) -> None:
    _, stored, rounded = checkpoint
    read, copy = open_checkpoint(stored), open_checkpoint(rounded)
    assert set(read.names()) == set(copy.names())
    quantized = 0
    for name in copy.names():
        raw, values = read.tensor(name), unpack(copy.tensor(name))
        assert read.layout(name) == (raw.format, raw.shape)
        np.testing.assert_array_equal(unpack(raw), values, err_msg=name)
        quantized += raw.format != "F32"
    assert quantized == 2 * 7
    ask_it: dict[str, Any] = {"kv_tokens": 2048, "kernels": "reference"}
    answers = []
    for path, more in ((stored, {"weights": "quantized"}), (rounded, {})):
        engine, _ = build_engine(EngineConfig(model=str(path), **ask_it, **more))
        answers.append(tokens(run(engine, ask("a", PROMPT, max_tokens=16))))
    assert answers[0] == answers[1]


def test_native_kernels_compute_with_the_packed_weights(
    checkpoint: tuple[str, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    how, stored, rounded = checkpoint
    loaded = load_model(EngineConfig(model=str(stored), kv_dtype="float32"), lambda *_: None)
    found = PagedRunner(loaded.decoder).step({"x": PROMPT})["x"]
    exact = PagedRunner(load_decoder(rounded)).step({"x": PROMPT})["x"]
    assert "kept as float32" not in caplog.text
    if "fp8" in how:  # inputs stay as they are
        torch.testing.assert_close(found, exact, atol=1e-3, rtol=0)
    # Inputs are rounded to 8 bits; a wrong scale or order would leave nothing alike.
    assert torch.corrcoef(torch.stack((found.flatten(), exact.flatten())))[0, 1] > 0.995
    assert exact.std() > 0.3, "logits too flat to tell anything"


def edit(folder: Path, config: dict[str, Any] | None = None, **tensors: Any) -> None:
    """Change quantization_config, and tensors of the first q_proj (None removes one)."""
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    stored["quantization_config"] |= config or {}
    path.write_text(json.dumps(stored))
    held = load_file(folder / "model.safetensors")
    for part, change in tensors.items():
        name = f"model.layers.0.self_attn.q_proj.{part}"
        made = change(held.pop(name))
        if made is not None:
            held[name] = made.contiguous()
    save_file(held, folder / "model.safetensors")


WRONG: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "bits": ("gptq 4 bits", {"bits": 3}, {}, "bits is 3: want 4 or 8"),
    "no bits": ("awq", {"bits": None}, {}, "bits is None: want 4"),
    "group": ("gptq 4 bits", {"group_size": 0}, {}, "group_size is 0"),
    "other group": (
        "gptq 4 bits",
        {"group_size": 64},
        {},
        r"scales is \[10, 192\], not \[5, 192\]",
    ),
    "marlin": ("gptq 4 bits", {"checkpoint_format": "marlin"}, {}, "is 'marlin': want gptq"),
    "dynamic": ("gptq 4 bits", {"dynamic": {"-:lm_head": {}}}, {}, "single modules"),
    "gemv": ("awq", {"version": "gemv"}, {}, "version is 'gemv': want gemm"),
    "order": ("gptq 4 bits", {}, {"g_idx": lambda t: t // 2}, "32 inputs in each group"),
    "floats": ("gptq 4 bits", {}, {"qweight": lambda t: t.float()}, "qweight is float32"),
    "short zeros": ("awq", {}, {"qzeros": lambda t: t[:, 1:]}, r"qzeros is \[6, 23\]"),
    "lost scales": ("awq", {}, {"scales": lambda t: None}, "it lacks 1 tensors: .*q_proj.weight"),
    "block": ("fp8 of blocks", {"weight_block_size": [64]}, {}, "want two sizes"),
    "fmt": ("fp8 of blocks", {"fmt": "e5m2"}, {}, "fmt is 'e5m2'"),
    "e5m2": (
        "fp8 of a tensor",
        {},
        {"weight": lambda t: t.float().to(torch.float8_e5m2)},
        "F8_E5M2: want F8_E4M3",
    ),
    "scale": (
        "fp8 of outputs",
        {},
        {"weight_scale": lambda t: t[1:]},
        r"its scale is \[191, 1\] for a weight of \[192, 192\]",
    ),
    "nan": (
        "fp8 of a tensor",
        {},
        {"weight": lambda t: torch.full(t.shape, float("nan")).to(t.dtype)},
        r"tensor model\.layers\.0\.self_attn\.q_proj\.weight: an 8-bit float is NaN",
    ),
    "format": ("compressed int4", {"format": "marlin-24"}, {}, "format is 'marlin-24'; known: "),
    "sparse": (
        "compressed int4",
        {"sparsity_config": {"format": "sparse-bitmask"}},
        {},
        "it has a sparsity_config",
    ),
    "shape": (
        "compressed int4",
        {},
        {"weight_shape": lambda t: t * 2},
        "want integers of 4 or 8 bits",
    ),
    "no sizes": ("compressed int4", {}, {"weight_shape": lambda t: t[:1]}, "hold two sizes"),
    "groups": (
        "compressed int4",
        {},
        {"weight_scale": lambda t: t[:, 1:]},
        r"scales are \[192, 5\] for a weight of \[192, 192\]",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_with_its_cause(
    wrong: str, source: Path, tmp_path: Path
) -> None:
    how, config, tensors, message = WRONG[wrong]
    stored = tmp_path / "stored"
    write_quantized(source, stored, tmp_path / "rounded", HOW[how])
    edit(stored, config, **tensors)
    with pytest.raises(CheckpointError, match=message):
        load_model(EngineConfig(model=str(stored)), lambda *_: None)


def test_a_method_is_one_module() -> None:
    folder = Path(quantization.__path__[0])
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert files == {"gptq", "awq", "fp8", "compressed_tensors"}
    known = quantization.methods()
    assert {"gptq", "awq", "fp8", "fbgemm_fp8", "compressed-tensors"} <= set(known)
    with pytest.raises(ValueError, match="gptq is registered twice"):
        quantization.register(type("Other", (known["gptq"],), {}))
