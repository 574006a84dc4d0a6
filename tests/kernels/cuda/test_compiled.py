"""Compiler output of the kernels for two generations of GPUs; no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import compiled_kernels
import pytest
from kernel_launches import LAUNCHES

pytestmark = pytest.mark.kernels

MOST_SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes per thread block
MATRIX_KERNELS = ("attend_kernel", "split_kernel", "_separate", "_looped", "_grouped")


def table() -> list[dict[str, Any]]:
    return [json.loads(line) for line in compiled_kernels.TABLE.read_text().splitlines()]


def test_compiled_kernels_spill_nothing_and_use_the_expected_instructions() -> None:
    """No register is spilled to memory, and matrix products use one instruction family for every
    batch."""
    lines = table()
    assert {line["arch"] for line in lines} == {80, 90}
    for line in lines:
        is_single = "float32" in line["launch"].partition(",")[2].partition(" over")[0] or (
            line["launch"].startswith("linear") and "torch.float32" in line["launch"]
        )
        family = {80: "HMMA", 90: "HGMMA"}[line["arch"]]
        expected = family if line["kernel"] in MATRIX_KERNELS and not is_single else ""
        assert line["mma"] == expected, line
        assert line["shared"] <= MOST_SHARED[line["arch"]], line
        assert line["spilled"] == 0, line


def test_every_launch_is_in_the_table() -> None:
    expected = {label for launches in LAUNCHES for label, _ in launches()}
    for arch in compiled_kernels.ARCHS:
        assert {line["launch"] for line in table() if line["arch"] == arch} == expected
    assert set(compiled_kernels.FEW) <= expected


@pytest.mark.timeout(600)
def test_freshly_compiled_kernels_match_the_table() -> None:
    """COMPILED=all compiles every kernel, which takes ten minutes."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    options = [] if os.environ.get("COMPILED") == "all" else ["--few"]
    script = Path(compiled_kernels.__file__)
    done = subprocess.run(
        [sys.executable, str(script), *options], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(compiled) >= 60
    known = table()
    assert [line for line in compiled if line not in known] == []
