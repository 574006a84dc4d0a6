"""Tensors under other names than the model requests, in stacks, and tensors of no model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from builders.tiny_models import write_tiny
from builders.viewed import assert_same_tensors
from builders.write_gguf import write_gguf
from safetensors.torch import load_file, save_file

from pdserve.engine.api import EngineConfig
from pdserve.engine.checkpoints import CheckpointError, Nth, View, ViewedCheckpoint, first_of
from pdserve.engine.load import LoadedModel, load_model, open_checkpoint
from pdserve.engine.weights.convert import unpack


def load(path: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(path)), lambda what, fraction: None)


def stacks(path: Path) -> dict[str, torch.Tensor]:
    """Write a model in which one tensor holds three matrices and `gate` a fourth one."""
    write_tiny(path, "llama")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "experts.up.weight": torch.randn((3, 4, 5), generator=generator),
        "gate.weight": torch.randn((4, 5), generator=generator),
    }
    save_file(tensors, path / "model.safetensors")
    return tensors


def of_experts(count: int) -> dict[str, View]:
    return {
        f"experts.{n}.up.weight": View("experts.up.weight", matrix=Nth(n, count))
        for n in range(count)
    }


def test_matrices_of_a_stack(tmp_path: Path) -> None:
    tensors = stacks(tmp_path)
    viewed = ViewedCheckpoint(open_checkpoint(tmp_path), of_experts(3))
    names = [f"experts.{n}.up.weight" for n in range(3)]
    assert set(viewed.names()) == {*names, "gate.weight"}
    for n, name in enumerate(names):
        assert viewed.layout(name) == ("F32", (4, 5))
        np.testing.assert_array_equal(unpack(viewed.tensor(name)), tensors["experts.up.weight"][n])


@pytest.mark.parametrize("count", [2, 4])
def test_a_stack_of_another_size_is_refused(count: int, tmp_path: Path) -> None:
    stacks(tmp_path)
    viewed = ViewedCheckpoint(open_checkpoint(tmp_path), of_experts(count))
    for look in (viewed.layout, viewed.tensor):
        with pytest.raises(CheckpointError, match=rf"is \[3, 4, 5\]; the config says {count} matr"):
            look("experts.0.up.weight")


def test_rows_of_a_transposed_matrix_of_a_stack(tmp_path: Path) -> None:
    tensors = stacks(tmp_path)
    views = {"a": View("experts.up.weight", slice(1, None, 2), Nth(2, 3), transposed=True)}
    viewed = ViewedCheckpoint(open_checkpoint(tmp_path), views)
    assert viewed.layout("a") == ("F32", (2, 4))
    expected = tensors["experts.up.weight"][2].T[1::2]
    np.testing.assert_array_equal(unpack(viewed.tensor("a")), expected)


def test_blocks_have_no_transpose(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "hf", "llama", hidden_size=96)
    gguf = open_checkpoint(write_gguf(source, tmp_path / "m.gguf", "Q8_0"))
    name = "model.layers.0.mlp.up_proj.weight"
    viewed = ViewedCheckpoint(gguf, {"a": View(name, transposed=True)})
    with pytest.raises(CheckpointError, match=f"{name} is Q8_0, which cannot be transposed"):
        viewed.tensor("a")


def test_a_vector_may_be_a_matrix_with_one_row(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    tensors = {"a": torch.arange(4.0), "b": torch.arange(8.0).view(2, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    views = {name: View(name, is_row=True) for name in tensors}
    viewed = ViewedCheckpoint(open_checkpoint(tmp_path), views)
    assert viewed.layout("a").shape == viewed.tensor("a").shape == (1, 4)
    assert viewed.layout("b").shape == viewed.tensor("b").shape == (2, 4), "b is a matrix already"
    assert unpack(viewed.tensor("a")).tolist() == [[0, 1, 2, 3]]


def test_the_first_existing_place_is_used(tmp_path: Path) -> None:
    tensors = stacks(tmp_path)
    second = View("experts.up.weight", matrix=Nth(1, 3))
    views = {
        "a": first_of(View("nowhere"), second),
        "b": first_of(View("gate.weight", slice(1, 3)), second),
        "c": first_of(View("nowhere"), View("neither"), View("nor this")),
    }
    viewed = ViewedCheckpoint(open_checkpoint(tmp_path), views)
    assert set(viewed.names()) == {"a", "b"}
    np.testing.assert_array_equal(unpack(viewed.tensor("a")), tensors["experts.up.weight"][1])
    np.testing.assert_array_equal(unpack(viewed.tensor("b")), tensors["gate.weight"][1:3])


def test_a_fused_matrix_with_unused_rows_is_refused(tmp_path: Path) -> None:
    """With a config of fewer heads, rows of k would be read as rows of v."""
    path = write_tiny(tmp_path, "phi3", num_key_value_heads=3)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1}))
    with pytest.raises(
        CheckpointError, match=r"v_proj.weight is \[120, 72\]; the config says \[24, 72"
    ):
        load(path)


@pytest.mark.parametrize("arch", ["glm4_moe", "minimax_m2", "llama"])
def test_layers_after_the_last_one_of_the_model(arch: str, tmp_path: Path) -> None:
    """Some architectures have extra layers that predict several tokens ahead."""
    path = write_tiny(tmp_path, arch)
    file = path / "model.safetensors"
    more = {"model.layers.3.eh_proj.weight": torch.ones((4, 4))}
    save_file(load_file(file) | more, file)
    if arch == "llama":
        with pytest.raises(CheckpointError, match=r"unexpected 1 tensors: model\.layers\.3\.eh"):
            load(path)
    else:
        assert load(path).decoder.config.num_layers == 3


def test_checkpoints_of_gpt_neox(tmp_path: Path) -> None:
    """The head has one of two names, and older checkpoints store masks and frequencies."""
    plain, other = (write_tiny(tmp_path / name, "gpt_neox") for name in ("plain", "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    for name in ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"):
        tensors[f"gpt_neox.layers.1.{name}"] = torch.ones(3)
    save_file(tensors, other / "model.safetensors")
    assert_same_tensors(other, plain)


def test_checkpoints_of_gpt2(tmp_path: Path) -> None:
    """Those that were saved without a head lack a prefix, and the first ones store masks."""
    plain, other = (write_tiny(tmp_path / name, "gpt2") for name in ("plain", "other"))
    tensors = load_file(other / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(tensors, other / "model.safetensors")
    assert_same_tensors(other, plain)
    masks = {"h.1.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.masked_bias": torch.zeros(())}
    save_file(tensors | masks, other / "model.safetensors")
    load(other)


def test_biases_of_zeros_of_cohere2_are_left_out(tmp_path: Path) -> None:
    """Its config states none; others than zeros are refused."""
    folder = write_tiny(tmp_path, "cohere2")
    tensors = load_file(folder / "model.safetensors")
    names = [name.replace("weight", "bias") for name in tensors if ".layers." in name]
    zeros = {name: torch.zeros(len(tensors[name.replace("bias", "weight")])) for name in names}
    save_file(tensors | zeros, folder / "model.safetensors")
    load(folder)
    zeros["model.layers.1.self_attn.k_proj.bias"][3] = 0.5
    save_file(tensors | zeros, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"unexpected 1 tensors: model\.layers\.1\.self_attn\.k_proj\.bias"
    ):
        load(folder)
