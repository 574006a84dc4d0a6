"""Quantized checkpoints: the values that are read equal those that their tools define, on every
backend."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.engine_kit import ask, run, tokens
from builders.paged_runner import PagedRunner, load_decoder
from builders.quantized import Quantized, awq, compressed, fp8, gptq, write_quantized
from builders.tiny_models import write_tiny
from safetensors.torch import load_file, save_file

from pdserve.engine.api import EngineConfig
from pdserve.engine.build import build_engine
from pdserve.engine.checkpoints import CheckpointError, quantization
from pdserve.engine.checkpoints.weight_loader import leaf
from pdserve.engine.load import load_model, open_checkpoint
from pdserve.engine.weights.convert import unpack
from pdserve.engine.weights.formats import INT4
from pdserve.engine.weights.formats.grouped import grouped

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
# Rows have whole groups; one input size is no multiple of 128.
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "head_dim": 64,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}
PROMPT = list(range(3, 60))
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("plain") / "model", "llama", **SIZES)


Written = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return a function that writes the folders of a quantized model and of its values, once
    each."""

    @cache
    def write(how: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("written")
        write_quantized(source, folder / "stored", folder / "rounded", HOW[how])
        return folder / "stored", folder / "rounded"

    return write


@pytest.mark.parametrize("how", HOW)
def test_values_and_tokens_equal_those_of_the_dequantized_copy(how: str, written: Written) -> None:
    stored, rounded = written(how)
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
        answers.append(tokens(run(engine, ask("a", PROMPT, max_tokens=4))))
    assert answers[0] == answers[1]


def test_native_kernels_compute_with_the_packed_weights(
    subtests: pytest.Subtests, written: Written, caplog: pytest.LogCaptureFixture
) -> None:
    for how in HOW:
        with subtests.test(how):
            caplog.clear()
            stored, rounded = written(how)
            config = EngineConfig(model=str(stored), kv_dtype="float32")
            loaded = load_model(config, lambda *_: None)
            found = PagedRunner(loaded.decoder).step({"x": PROMPT})["x"]
            exact = PagedRunner(load_decoder(rounded)).step({"x": PROMPT})["x"]
            assert "kept as float32" not in caplog.text
            if "fp8" in how:  # inputs are not rounded
                torch.testing.assert_close(found, exact, atol=1e-3, rtol=0)
            # Inputs are rounded to 8 bits; a wrong scale or order would remove all correlation.
            assert torch.corrcoef(torch.stack((found.flatten(), exact.flatten())))[0, 1] > 0.995
            assert exact.std() > 0.3, "the logits are too flat to compare"


def edit(folder: Path, config: dict[str, Any] | None = None, **tensors: Any) -> None:
    """Change quantization_config, and tensors of the first q_proj (None removes one)."""
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    stored["quantization_config"] |= config or {}
    path.write_text(json.dumps(stored))
    held = load_file(folder / "model.safetensors")
    for part, change in tensors.items():
        name = f"{Q_PROJ.removesuffix('weight')}{part}"
        made = change(held.pop(name))
        if made is not None:
            held[name] = made.contiguous()
    save_file(held, folder / "model.safetensors")


def as_type(dtype: torch.dtype) -> Any:
    return lambda tensor: tensor.to(dtype)


def taken(*index: Any) -> Any:
    return lambda tensor: tensor[index]


def filled(number: float) -> Any:
    return lambda tensor: torch.full_like(tensor, number)


WRONG: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "bits": ("gptq 4 bits", {"bits": 3}, {}, "bits is 3: expected 4 or 8"),
    "no bits": ("awq", {"bits": None}, {}, "bits is None: expected 4"),
    "group": ("gptq 4 bits", {"group_size": 0}, {}, "group_size is 0"),
    "huge group": ("gptq 4 bits", {"group_size": 10**30}, {}, "group_size is 10000"),
    "other group": ("gptq 4 bits", {"group_size": 64}, {}, r"scales is .*, expected \[5, 192\]"),
    "marlin": ("gptq 4 bits", {"checkpoint_format": "marlin"}, {}, "is 'marlin': expected gptq"),
    "dynamic": ("gptq 4 bits", {"dynamic": {"up": {"bits": 8}}}, {}, "not supported .dynamic: up"),
    "odd dynamic": ("gptq 4 bits", {"dynamic": [1]}, {}, "quantization_config of gptq"),
    "gemv": ("awq", {"version": "gemv"}, {}, "version is 'gemv': expected gemm"),
    "order": ("gptq 4 bits", {}, {"g_idx": lambda t: t // 2}, "32 inputs in each group"),
    "short order": ("gptq 4 bits", {}, {"g_idx": taken(slice(9))}, r"g_idx is int32 \[9\]"),
    "floats": ("gptq 4 bits", {}, {"qweight": as_type(torch.float32)}, "qweight is float32"),
    "nothing": ("gptq 4 bits", {}, {"qweight": taken(slice(0))}, r"qweight is int32 \[0, 192\]"),
    "float zeros": ("gptq 4 bits", {}, {"qzeros": as_type(torch.float32)}, "qzeros is float32"),
    "short zeros": (
        "awq",
        {},
        {"qzeros": taken(slice(None), slice(1, None))},
        "expected int32 .6, 24",
    ),
    "lost scales": ("awq", {}, {"scales": lambda t: None}, "missing 1 tensors: .*q_proj.weight"),
    "block": ("fp8 of blocks", {"weight_block_size": [64]}, {}, "expected two sizes"),
    "no block": ("fp8 of blocks", {"weight_block_size": [0, 1]}, {}, "is 0: expected a positive"),
    "fmt": ("fp8 of blocks", {"fmt": "e5m2"}, {}, "fmt is 'e5m2'"),
    "e5m2": (
        "fp8 of a tensor",
        {},
        {"weight": lambda t: t.float().to(torch.float8_e5m2)},
        "F8_E5M2: expected F8_E4M3",
    ),
    "not compressed": (
        "fp8 of a tensor",
        {},
        {"weight": as_type(torch.bfloat16)},
        "has a scale but is not quantized",
    ),
    "scale": (
        "fp8 of outputs",
        {},
        {"weight_scale": taken(slice(1, None))},
        r"scale is \[191, 1\] for a weight of \[192, 192\]",
    ),
    "nan": (
        "fp8 of a tensor",
        {},
        {"weight": lambda t: torch.full(t.shape, float("nan")).to(t.dtype)},
        r"tensor model\.layers\.0\.self_attn\.q_proj\.weight: an 8-bit float is NaN",
    ),
    **{
        f"{number} in {how}": (
            how,
            {},
            {part: filled(number)},
            r"tensor model\.layers\.0\.self_attn\.q_proj\.weight: a scale is infinite or NaN",
        )
        for how, part in (
            ("gptq 4 bits", "scales"),  # has float16 scales
            ("compressed int4", "weight_scale"),
            ("fp8 of outputs", "weight_scale"),
        )
        for number in (float("inf"), float("nan"))
    },
    "large scale": (
        "fp8 of a tensor",
        {},
        {"weight_scale": filled(2e36)},
        r"self_attn\.q_proj\.weight: a scale of 8-bit floats is 2\^119 or more",
    ),
    "small divisor": (
        "compressed nvfp4",
        {},
        {"weight_global_scale": filled(1e-40)},
        r"self_attn\.q_proj\.weight: a divisor is not finite or below 2\^-116",
    ),
    "format": ("compressed int4", {"format": "marlin-24"}, {}, "format is 'marlin-24': expected "),
    "sparse": (
        "compressed int4",
        {"sparsity_config": {"format": "sparse-bitmask"}},
        {},
        "the setting sparsity_config is not supported",
    ),
    "shape": (
        "compressed int4",
        {},
        {"weight_shape": lambda t: t * 2},
        "expected integers of 4 or 8 bits",
    ),
    "endless": (
        "compressed int4",
        {},
        {"weight_shape": lambda t: t * 2**40},
        "expected a positive",
    ),
    "no sizes": ("compressed int4", {}, {"weight_shape": taken(slice(1))}, "hold two sizes"),
    "long": (
        "compressed int4",
        {},
        {"weight_packed": as_type(torch.int64)},
        "expected int32 or uint8",
    ),
    "groups": (
        "compressed int4",
        {},
        {"weight_scale": taken(slice(None), slice(1, None))},
        r"scales are \[192, 5\] for a weight of \[192, 192\]",
    ),
    "flat": ("compressed int4", {}, {"weight_scale": taken(0)}, r"scales are \[6\] for a weight"),
    "unlike zeros": (
        "compressed int4, zeros",
        {},
        {"weight_zero_point": lambda t: t.float()},
        "weight_zero_point is float32",
    ),
    "whole": (
        "compressed nvfp4",
        {},
        {"weight_global_scale": lambda t: t * 0},
        "must be one float32 above 0",
    ),
    "two blocks": (
        "compressed fp8 of outputs",
        {"config_groups": {str(n): {"weights": {"block_structure": [128, n]}} for n in (64, 128)}},
        {},
        "different block sizes",
    ),
}


def test_invalid_checkpoints_are_refused_with_the_cause(
    subtests: pytest.Subtests, written: Written, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for wrong in WRONG:
        with subtests.test(wrong):
            tmp_path = tmp_path_factory.mktemp("case")
            how, config, tensors, message = WRONG[wrong]
            stored = shutil.copytree(written(how)[0], tmp_path / "stored")
            edit(stored, config, **tensors)
            with pytest.raises(CheckpointError, match=message):
                load_model(EngineConfig(model=str(stored)), lambda *_: None)


def test_a_nonfinite_scale_of_expanded_weights_is_refused(source: Path, tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    narrow = compressed("pack-quantized", num_bits=4, strategy="group", group_size=16)
    write_quantized(source, stored, tmp_path / "rounded", narrow)
    load_model(EngineConfig(model=str(stored)), lambda *_: None)
    edit(stored, weight_scale=filled(float("inf")))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight: a scale is infinite or NaN"):
        load_model(EngineConfig(model=str(stored)), lambda *_: None)


def test_extra_fields_and_tensors_of_real_files_are_ignored(source: Path, tmp_path: Path) -> None:
    stored, rounded = tmp_path / "stored", tmp_path / "rounded"
    write_quantized(source, stored, rounded, HOW["gptq 4 bits"])
    before = unpack(open_checkpoint(stored).tensor(Q_PROJ))
    edit(stored, {"dynamic": {"-:lm_head": {}, "+:up": {"bits": 4}}, "checkpoint_format": None})
    held = load_file(stored / "model.safetensors")
    zero = {f"{Q_PROJ.removesuffix('weight')}bias": torch.zeros(192)}  # as AutoGPTQ adds it
    save_file(held | zero, stored / "model.safetensors")
    loaded = load_model(EngineConfig(model=str(stored)), lambda *_: None)
    np.testing.assert_array_equal(unpack(open_checkpoint(stored).tensor(Q_PROJ)), before)
    # Everything that determines the values is part of the digest.
    edit(stored, {"checkpoint_format": "gptq_v2"})
    other = load_model(EngineConfig(model=str(stored)), lambda *_: None)
    assert other.card.weights_digest != loaded.card.weights_digest
    config = json.loads((stored / "config.json").read_text())
    settings = config.pop("quantization_config")
    (stored / "config.json").write_text(json.dumps(config))
    del settings["quant_method"]
    (stored / "quantize_config.json").write_text(json.dumps(settings))  # as in older AutoGPTQ
    again = load_model(EngineConfig(model=str(stored)), lambda *_: None)
    assert again.card.weights_digest == other.card.weights_digest


def test_a_block_scale_may_be_bfloat16(source: Path, tmp_path: Path) -> None:
    stored, rounded = tmp_path / "stored", tmp_path / "rounded"
    write_quantized(source, stored, rounded, HOW["fp8 of blocks"])
    exact = unpack(open_checkpoint(stored).tensor(Q_PROJ))
    edit(stored, weight_scale_inv=as_type(torch.bfloat16))
    found = unpack(open_checkpoint(stored).tensor(Q_PROJ))
    np.testing.assert_allclose(found, exact, rtol=2**-8)
    assert (found != exact).any()


def test_a_digest_distinguishes_parts_of_different_types() -> None:
    codes, scales = np.zeros((4, 16), np.uint8), np.ones((4, 1), np.float16)
    halves = grouped(INT4, codes, scales)
    brains = grouped(INT4, codes, scales.view(np.uint16))
    assert leaf("a", halves) != leaf("a", brains)
    ordered = grouped(INT4, codes, scales, columns=np.arange(32)[::-1])
    assert len({leaf("a", raw) for raw in (halves, brains, ordered)}) == 3


def test_matrices_of_one_product_may_have_different_column_orders(
    source: Path, tmp_path: Path
) -> None:
    """Matrices with another order than the first are expanded, with correct values."""
    stored, rounded = tmp_path / "stored", tmp_path / "rounded"
    write_quantized(source, stored, rounded, HOW["gptq 4 bits, ordered"])
    prefix = Q_PROJ.removesuffix("weight")
    held = load_file(stored / "model.safetensors")
    held[prefix + "g_idx"] = held[prefix + "g_idx"].flip(0)
    save_file(held, stored / "model.safetensors")
    values = load_file(rounded / "model.safetensors")
    values[Q_PROJ] = torch.from_numpy(unpack(open_checkpoint(stored).tensor(Q_PROJ)))
    save_file(values, rounded / "model.safetensors")
    loaded = load_model(EngineConfig(model=str(stored), kv_dtype="float32"), lambda *_: None)
    found = PagedRunner(loaded.decoder).step({"x": PROMPT})["x"]
    exact = PagedRunner(load_decoder(rounded)).step({"x": PROMPT})["x"]
    assert torch.corrcoef(torch.stack((found.flatten(), exact.flatten())))[0, 1] > 0.995


def test_a_method_is_defined_in_one_module() -> None:
    folder = Path(quantization.__path__[0])
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {"gptq", "awq", "fp8", "compressed_tensors"} <= files
    known = quantization.methods()
    assert {"gptq", "awq", "fp8", "fbgemm_fp8", "compressed-tensors"} <= set(known)
    with pytest.raises(ValueError, match="gptq is registered twice"):
        quantization.register(type("Other", (known["gptq"],), {}))
