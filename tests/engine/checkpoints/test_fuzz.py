"""Hostile model files end in success or a CheckpointError, within a memory limit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import write_tiny
from write_gguf import write_gguf

SCRIPT = Path(__file__).parents[2] / "support" / "fuzz_checkpoints.py"
EXAMPLES = 400


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_mutated_files(kind: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama", num_hidden_layers=1)
    source = folder / "model.safetensors"
    if kind == "gguf":
        source = write_gguf(folder, tmp_path / "whole.gguf", "Q8_0")
    else:
        source = source.rename(tmp_path / "whole.safetensors")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), kind, str(source), str(EXAMPLES), str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads(done.stdout)
    print(kind, outcomes)
    assert sum(outcomes.values()) >= EXAMPLES * 0.9
    assert outcomes["refused"] > EXAMPLES / 4
    assert outcomes["read"] > 0
