"""Accuracy of KV dtypes for models whose keys have large biases, and the warnings about it."""

import random
from pathlib import Path

import numpy as np
import pytest
from builders.tiny_models import write_tiny
from oracles.kv_quality import kv_quality, logits_of, write_biased

from pdserve.engine.api import EngineConfig
from pdserve.engine.architectures import parse_config
from pdserve.engine.backends.native import NativeBackend
from pdserve.engine.load import load_model, open_checkpoint
from pdserve.engine.models.kv_error import int8_score_error
from pdserve.engine.weights.convert import unpack

IDS = random.Random(3).choices(range(256), k=256)


def test_the_default_is_close_to_float32_for_keys_with_large_biases(tmp_path: Path) -> None:
    model = write_biased(tmp_path / "model")
    exact = logits_of(model, "float32", IDS)
    found = {name: kv_quality(exact, logits_of(model, name, IDS)) for name in ("bf16", "int8")}
    default = kv_quality(exact, logits_of(model, "auto", IDS))
    assert default == kv_quality(exact, logits_of(model, "float16", IDS))
    assert default.kl <= 0.001
    assert default.same_top >= 0.99
    assert 0 < default.kl < found["bf16"].kl / 10
    assert found["int8"].kl > 0.01, "the biases are too small to show a difference"


@pytest.mark.parametrize("arch", ["llama", "gemma3", "deepseek_v3"])
def test_the_default_takes_as_many_bytes_as_bf16(arch: str, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", arch)
    groups = [
        load_model(
            EngineConfig(model=str(model), kv_dtype=kv_dtype), lambda *_: None
        ).decoder.kv_groups
        for kv_dtype in ("auto", "bf16")
    ]
    for default, bf16 in zip(*groups, strict=True):
        assert (default.dtype, bf16.dtype) == (NativeBackend.default_kv_dtype, "bfloat16")
        assert default.block_bytes(32) == bf16.block_bytes(32) > 0


@pytest.mark.parametrize(("largest", "said"), [(200.0, True), (1.0, False)])
def test_int8_logs_a_warning_for_large_biases(
    largest: float, said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_biased(tmp_path / "model", largest)
    for kv_dtype in ("auto", "int8"):
        caplog.clear()
        load_model(EngineConfig(model=str(model), kv_dtype=kv_dtype), lambda *_: None)
        warned = [r for r in caplog.records if "rounding them to 8 bits changes" in r.getMessage()]
        assert len(warned) == (said and kv_dtype == "int8")


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_int8_logs_a_warning_for_latent_attention(
    kv_dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny(tmp_path / "model", "deepseek_v3")
    load_model(EngineConfig(model=str(model), kv_dtype=kv_dtype), lambda *_: None)
    said = "--kv-dtype int8: DeepseekV3ForCausalLM caches one vector per token"
    assert (said in caplog.text) == (kv_dtype == "int8")


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen2"])
def test_the_estimated_error_of_int8_scores(arch: str, tmp_path: Path) -> None:
    """It is 0 without biases or with a norm after them, and otherwise grows with the largest
    bias."""
    overrides = {"attention_bias": True} if arch == "qwen3" else {}
    checkpoint = open_checkpoint(write_tiny(tmp_path / "model", arch, **overrides))
    config = parse_config(checkpoint.hf_config)

    def error(factor: float) -> float:
        return int8_score_error(
            config,
            lambda name: unpack(checkpoint.tensor(name)) * np.float32(1 + factor * ("k_p" in name)),
        )

    if arch == "qwen2":
        assert error(99) == pytest.approx(100 * error(0))
        assert error(0) > 0
    else:
        assert error(0) == error(99) == 0
