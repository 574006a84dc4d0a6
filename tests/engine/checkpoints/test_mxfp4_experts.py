"""Experts of released gpt-oss checkpoints: 4-bit floats, with interleaved rows of gate and up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.engine_kit import ask, run, tokens
from builders.paged_runner import PagedRunner, load_decoder
from builders.quantized import write_mxfp4_experts
from builders.tiny_models import write_tiny
from builders.viewed import viewed
from safetensors.torch import load_file, save_file

from pdserve.engine.api import EngineConfig
from pdserve.engine.build import build_engine
from pdserve.engine.checkpoints import CheckpointError
from pdserve.engine.load import load_model, open_checkpoint
from pdserve.engine.weights.convert import unpack

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
PROMPT = list(range(3, 60))
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Return the model's folder; the folder of its values is its sibling "rounded"."""
    source = write_tiny(tmp_path / "plain", "gpt_oss", **SIZES)
    write_mxfp4_experts(source, tmp_path / "stored", tmp_path / "rounded")
    return tmp_path / "stored"


def test_values_and_tokens_equal_those_that_transformers_reads(stored: Path) -> None:
    rounded = stored.with_name("rounded")
    read, copy = viewed(stored), viewed(rounded)
    assert set(read.names()) == set(copy.names())
    for name in copy.names():
        raw, values = read.tensor(name), unpack(copy.tensor(name))
        assert read.layout(name) == (raw.format, raw.shape)
        np.testing.assert_array_equal(unpack(raw), values, err_msg=name)
        of_expert = ".experts." in name and name.endswith(".weight")
        assert raw.format == ("MXFP4" if of_expert else "F32")
    answers = []
    for path, more in ((stored, {"weights": "quantized"}), (rounded, {})):
        config = EngineConfig(model=str(path), kv_tokens=2048, kernels="reference", **more)
        engine, _ = build_engine(config)
        answers.append(tokens(run(engine, ask("a", PROMPT, max_tokens=16))))
    assert answers[0] == answers[1]


def test_native_kernels_compute_with_the_stored_blocks(
    stored: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_model(EngineConfig(model=str(stored), kv_dtype="float32"), lambda *_: None)
    assert loaded.card.quantization == "MXFP4"
    found = PagedRunner(loaded.decoder).step({"x": PROMPT})["x"]
    exact = PagedRunner(load_decoder(stored.with_name("rounded"))).step({"x": PROMPT})["x"]
    assert "kept as float32" not in caplog.text
    assert torch.corrcoef(torch.stack((found.flatten(), exact.flatten())))[0, 1] > 0.99
    assert exact.std() > 0.3, "the logits are too flat to compare"


def edit(folder: Path, **changes: Callable[[Any], Any]) -> None:
    """Change the blocks and scales of the first gate_up_proj."""
    held = load_file(folder / "model.safetensors")
    for part, change in changes.items():
        held[f"{GATE_UP}_{part}"] = change(held[f"{GATE_UP}_{part}"]).contiguous()
    save_file(held, folder / "model.safetensors")


def test_blocks_may_have_three_dims(stored: Path) -> None:
    before = unpack(open_checkpoint(stored).tensor(f"{GATE_UP}.weight"))
    edit(stored, blocks=lambda blocks: blocks.flatten(2))
    after = unpack(open_checkpoint(stored).tensor(f"{GATE_UP}.weight"))
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": lambda s: s[:, :, 0]}, r"scales are uint8 \[5, 192\]: expected uint8, 3 dims"),
        ({"scales": lambda s: s.float()}, r"scales are float32 \[5, 192, 2\]: expected uint8"),
        (
            {"scales": lambda s: s[:, 1:]},
            r"blocks is uint8 \[5, 192, 2, 16\], expected .*5, 191, 2, 16",
        ),
        ({"blocks": lambda b: b[..., :15]}, r"blocks is uint8 \[5, 192, 2, 15\]"),
        (
            {"blocks": lambda b: b[:4], "scales": lambda s: s[:4]},
            r"gate_up_proj.weight is \[4, 192, 64\]; the config says 5 matrices",
        ),
        (
            {"blocks": lambda b: b[:, 2:], "scales": lambda s: s[:, 2:]},
            r"experts.0.gate_proj.weight is \[95, 64\]; the config says \[96, 64\]",
        ),
    ],
)
def test_inconsistent_parts_are_refused(
    changes: dict[str, Callable[[Any], Any]], message: str, stored: Path
) -> None:
    edit(stored, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(EngineConfig(model=str(stored)), lambda *_: None)
