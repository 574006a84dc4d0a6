"""The backend that the options select, and errors for unavailable ones."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from builders.paged_runner import read_config
from builders.tiny_models import write_tiny

from pdserve.engine.api import EngineConfig
from pdserve.engine.architectures import parse_config
from pdserve.engine.backends import choose
from pdserve.engine.models import Encoder, UnsupportedModel


def test_auto_selects_a_backend(subtests: pytest.Subtests) -> None:
    for options, name in (
        ({}, "native"),
        ({"device": "cuda"}, "cuda"),
        ({"weights": "float32"}, "reference"),
        ({"device": "cuda", "weights": "float32"}, "reference"),
        ({"device": "cuda", "weights": "bf16"}, "cuda"),
        ({"device": "cuda", "block_size": 24}, "reference"),
        ({"device": "cuda", "kernels": "reference"}, "reference"),
    ):
        with subtests.test(name, **options):
            assert choose(EngineConfig(**options)).name == name


def test_contradictory_options_are_refused(subtests: pytest.Subtests) -> None:
    for options, text in (
        ({"kernels": "cuda"}, "--kernels cuda contradicts --device cpu"),
        ({"kernels": "native", "device": "cuda"}, "--kernels native contradicts --device cuda"),
        (
            {"device": "cuda", "kv_dtype": "int8"},
            "--kv-dtype int8 needs the native kernels, which --device cuda excludes",
        ),
        (
            {"kernels": "cuda", "device": "cuda", "weights": "float32"},
            "--kernels cuda contradicts --weights float32",
        ),
        (
            {"kernels": "cuda", "device": "cuda", "block_size": 24},
            "--kernels cuda contradicts --block-size 24, which is not a multiple of 16",
        ),
    ):
        with subtests.test(text):
            with pytest.raises(ValueError) as raised:
                choose(EngineConfig(**options))
            assert str(raised.value) == text


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pdserve.engine.backends.cuda", raising=False)
    for name in [name for name in sys.modules if name.startswith("pdserve.kernels.cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("pdserve.engine.models.cuda")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match=r"needs triton: .*pdserve\[torch,cuda\]"):
        choose(EngineConfig(device="cuda"))


def test_what_cuda_kernels_do_not_compute(tmp_path: Path) -> None:
    from pdserve.engine.models.cuda import CudaDecoder

    config = parse_config(read_config(write_tiny(tmp_path, "gpt2")))
    device = torch.device("cpu")
    config = replace(config, encoder=Encoder())
    with pytest.raises(UnsupportedModel, match="does not compute encoders"):
        CudaDecoder(config, pytest.fail, torch.float32, "float32", device)


def test_the_pool_leaves_memory_for_windows_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdserve.engine.backends import cuda

    free = 64 << 30
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(cuda, "CudaDecoder", lambda *args: None)
    config = EngineConfig(device="cuda", max_running=193, host_engines=2)  # graph of 256 rows
    backend = choose(config)(config)
    windows = 2 * 8 * (32 << 20)
    assert backend.pool_bytes() == int(free * 0.9) // 2 - windows
    model = SimpleNamespace(
        context_len=32768,
        num_heads=32,
        head_dim=128,
        ffn_size=14336,
        hidden_size=4096,
        latent=None,
        encoder=None,
    )
    for latent, splits in ((None, 128), (object(), 32)):
        model.latent = latent
        backend.decoder(model, lambda name: pytest.fail(name))  # type: ignore[arg-type]
        partials = 2 * 256 * 32 * splits * 130 * 4
        assert backend.pool_bytes() == int(free * 0.9) // 2 - windows - partials - 256 * 28672 * 8


def test_a_gpu_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"needs compute capability 8\.0, but this GPU has 7\.5"):
        choose(EngineConfig(device="cuda"))(EngineConfig(device="cuda"))
