"""Experts under each name and in each stacked form that files use."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders.tiny_models import write_tiny
from builders.viewed import assert_same_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.engine.architectures.qwen3 import MOE_GGUF

Tensors = dict[str, Tensor]
EXPERTS, LAYERS = 5, 3


def stacks(tensors: Tensors, prefix: str) -> Tensors:
    """Return the experts of one layer, with one tensor per projection; remove them from
    `tensors`."""
    return {
        name: torch.stack([tensors.pop(f"{prefix}{n}.{name}.weight") for n in range(EXPERTS)])
        for name in ("gate_proj", "up_proj", "down_proj")
    }


def gguf_stacks(tensors: Tensors, prefix: str) -> Tensors:
    return {f"{prefix}{name}.weight": stack for name, stack in stacks(tensors, prefix).items()}


def gate_above_up(leaf: str) -> Callable[[Tensors, str], Tensors]:
    def write(tensors: Tensors, prefix: str) -> Tensors:
        own = stacks(tensors, prefix)
        fused = torch.cat((own["gate_proj"], own["up_proj"]), 1)
        return {f"{prefix}gate_up_proj{leaf}": fused, f"{prefix}down_proj{leaf}": own["down_proj"]}

    return write


def mixtral(tensors: Tensors, prefix: str) -> Tensors:
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    there = prefix.replace("mlp", "block_sparse_moe")
    return {
        f"{there}{n}.{names[name]}.weight": matrix
        for name, stack in stacks(tensors, prefix).items()
        for n, matrix in enumerate(stack)
    }


@pytest.mark.parametrize(
    "write",
    [gguf_stacks, gate_above_up(".weight"), gate_above_up(""), mixtral],
    ids=["stacks", "GGUF's stack of both", "transformers' stack of both", "Mixtral's names"],
)
def test_values_are_the_same_in_every_form(
    write: Callable[[Tensors, str], Tensors], tmp_path: Path
) -> None:
    source = write_tiny(tmp_path / "source", "qwen3_moe")
    other = write_tiny(tmp_path / "other", "qwen3_moe")
    tensors = load_file(source / "model.safetensors")
    for layer in range(LAYERS):
        tensors |= write(tensors, f"model.layers.{layer}.mlp.experts.")
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert not any(name.endswith(".0.gate_proj.weight") for name in kept)
    save_file(kept, other / "model.safetensors")
    assert_same_tensors(other, source)


def test_names_of_single_experts_in_gguf() -> None:
    found = MOE_GGUF.hf_name("blk.12.ffn_up.7.weight")
    assert found == "model.layers.12.mlp.experts.7.up_proj.weight"
    assert MOE_GGUF.hf_name("blk.12.ffn_up.weight") == "model.layers.12.mlp.up_proj.weight"
    assert MOE_GGUF.hf_name("blk.12.ffn_up.x.weight") is None
    assert MOE_GGUF.hf_name("blk.12.ffn_norm.7.weight") is None
