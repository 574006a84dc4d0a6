"""--device: what "auto" selects, and the error for a missing GPU."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from pdserve.engine.load import resolve_device


@pytest.mark.parametrize(
    ("cuda", "available", "text"),
    [(None, False, "is built without CUDA"), ("13.0", False, "torch finds no GPU")],
)
def test_without_a_gpu(
    cuda: str | None, available: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "version", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    with pytest.raises(ValueError, match=f"^--device cuda: .*{text}"):
        resolve_device("cuda")
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"


def test_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "version", SimpleNamespace(cuda="13.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"
    assert resolve_device("cpu") == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_worker_exits_with_one_sentence() -> None:
    command = [sys.executable, "-m", "pdserve.cli.main", "decode", "--device", "cuda"]
    done = subprocess.run(
        [*command, "--routers", "127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PDSERVE_CLUSTER_SECRET": "x" * 32},
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("pdserve: ")]
    assert "--device cuda: " in line
