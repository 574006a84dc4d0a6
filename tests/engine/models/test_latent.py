"""Latent attention: its matrices in files, its cache, and refused configs. test_architectures.py
compares its logits with those of transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.engine_kit import ask, of, run, tokens
from builders.paged_runner import PagedRunner
from builders.quantized import QUANTIZED, Quantized, awq, compressed, fp8, gptq, write_quantized
from builders.tiny_models import write_tiny
from builders.viewed import assert_same_tensors, viewed
from builders.write_gguf import write_gguf

from pdserve.engine.api import EngineConfig, Finished
from pdserve.engine.architectures import parse_config
from pdserve.engine.build import build_engine
from pdserve.engine.checkpoints import CheckpointError, HeadRows, RopeRows, View
from pdserve.engine.kv import KvSpec, LayerGroup
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.load import LoadedModel, find_spec, isq_formats, load_model, open_checkpoint
from pdserve.engine.models import UnsupportedModel
from pdserve.engine.weights import VALUES, RawTensor
from pdserve.engine.weights.convert import unpack

WIDE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 64,
    "moe_intermediate_size": 64,
}
HOW: dict[str, Quantized] = {
    "fp8": fp8("block"),
    "gptq ordered": gptq(4, 32, ordered=True),
    "awq": awq(32),
    "int4": compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "nvfp4": compressed(
        "nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16, type="float"
    ),
    "mxfp4": compressed(
        "mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32, type="float"
    ),
}


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), **options), lambda *_: None)


@pytest.mark.parametrize("how", HOW)
def test_quantized_matrices_are_split_by_rows(how: str, tmp_path: Path) -> None:
    """Covers rows by head, transposed keys, and rows of rope first. The values equal those of the
    whole matrix."""
    source = write_tiny(tmp_path / "source", "deepseek_v3", **WIDE)
    write_quantized(source, tmp_path / "stored", tmp_path / "rounded", HOW[how])
    stored = viewed(tmp_path / "stored")
    formats = {name: stored.layout(name).format for name in stored.names()}
    assert len(set(formats.values())) == 2, formats
    plain = {name for name, format in formats.items() if format == "F32"}
    turned = {f"model.layers.{n}.self_attn.k_b_proj.weight" for n in range(3)}
    assert {name for name in plain if name.endswith(QUANTIZED)} == turned == {*stored.expanded()}
    assert_same_tensors(tmp_path / "stored", tmp_path / "rounded")


@pytest.mark.parametrize("how", HOW)
def test_quantized_matrices_give_the_results_of_their_values(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the weights that became float32."""
    source = write_tiny(tmp_path / "source", "deepseek_v3", **WIDE)
    write_quantized(source, tmp_path / "stored", tmp_path / "rounded", HOW[how])
    found, exact = (
        PagedRunner(load(tmp_path / name, kv_dtype="float32").decoder).step({"x": range(40)})["x"]
        for name in ("stored", "rounded")
    )
    assert torch.corrcoef(torch.stack((found.flatten(), exact.flatten())))[0, 1] > 0.99
    assert caplog.text.count("3 weights are kept as float32: their stored format has no") == 1
    if how == "gptq ordered":  # 3 matrices of 9 experts in 2 layers: each has its order
        assert "54 weights of format INT4 are kept as float32" in caplog.text
    else:
        assert caplog.text.count("kept as float32") == 1
    caplog.clear()
    load(tmp_path / "stored", isq="q8_0")  # only they remain to be quantized
    assert "has no transpose" not in caplog.text


def test_files_from_before_absorption_give_the_same_model(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "deepseek_v2")
    now = write_gguf(folder, tmp_path / "now.gguf")
    before = write_gguf(folder, tmp_path / "before.gguf", absorbed=False)
    configs = [parse_config(open_checkpoint(file).hf_config) for file in (now, before)]
    assert configs[0] == configs[1]
    assert_same_tensors(before, folder)
    assert "model.layers.0.self_attn.kv_b_proj.weight" in open_checkpoint(before).names()
    assert "model.layers.0.self_attn.k_b_proj.weight" in open_checkpoint(now).names()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_yarn_in_gguf(scores: str, tmp_path: Path) -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    arch = "deepseek_v2" if scores == "softmax" else "deepseek_v3"
    folder = write_tiny(tmp_path / "hf", arch, rope_parameters=yarn)
    got, expected = (
        parse_config(open_checkpoint(path).hf_config)
        for path in (write_gguf(folder, tmp_path / "m.gguf"), folder)
    )
    assert got.architecture == expected.architecture
    assert got.layers == expected.layers
    assert got.layers[0].rope is not None
    assert got.layers[0].rope.attention_factor == 1
    assert got.attn_scale == pytest.approx(expected.attn_scale, rel=1e-6)
    plain = parse_config(open_checkpoint(write_tiny(tmp_path / "plain", arch)).hf_config)
    assert got.attn_scale == pytest.approx(1.3158 * plain.attn_scale, rel=1e-3)


def test_a_block_holds_one_vector_per_token(subtests: pytest.Subtests) -> None:
    """In the pool and on the wire it takes half the bytes of keys and values."""
    for dtype in ("float32", "bfloat16", "float16", "int8"):
        with subtests.test(dtype):
            latent = LayerGroup((0, 1, 2), "latent", 0, 1, 12, dtype, 0, 1)
            assert 2 * latent.block_bytes(16) == replace(latent, kind="full").block_bytes(16)
            kv = KvCache(KvSpec(16, (latent,)), [5])
            if dtype != "int8":
                assert kv.layer(1)[0].shape == (6, 1, 1, 16, 12)
            raw = kv.data[0].reshape(3, 6, -1).view(np.uint8)
            raw[:] = np.random.default_rng(1).integers(0, 256, raw.shape)
            payload = b"".join(kv.read(0, range(3), [4, 2]))
            assert len(payload) == 3 * 2 * latent.block_bytes(16)
            other = KvCache(kv.spec, [5])
            other.write(0, range(3), [1, 3], memoryview(payload))
            np.testing.assert_array_equal(
                other.data[0].reshape(3, 6, -1).view(np.uint8)[:, [1, 3]], raw[:, [4, 2]]
            )


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_a_common_prefix_is_cached(kernels: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model", "deepseek_v3")
    options = EngineConfig(model=str(path), kernels=kernels, kv_tokens=1024, block_size=16)
    prompts = [[*range(70), n, n + 1] for n in (80, 90)]
    engine, _ = build_engine(options)
    (group,) = engine.kv.spec.groups
    assert (group.kind, group.block_shape, group.keys_by_dim) == ("latent", (1, 1, 36), False)
    found = [run(engine, ask(str(n), ids, max_tokens=12)) for n, ids in enumerate(prompts)]
    (finished,) = of(found[1], Finished)
    assert finished.cached_tokens == 64
    alone, _ = build_engine(options)
    expected = run(alone, ask("1", prompts[1], max_tokens=12))
    assert tokens(found[1]) == tokens(expected)


def test_latent_matrices_are_quantized_in_place(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model", "deepseek_v3", **WIDE)
    checkpoint = viewed(path)
    config = parse_config(open_checkpoint(path).hf_config)
    formats = isq_formats("q4_0", config, checkpoint)
    attn = {n.split(".")[-2]: f for n, f in formats.items() if "layers.1.self_attn" in n}
    assert attn == {
        "q_a_proj": "Q4_0",
        "kv_a_proj_with_mqa": "Q4_0",
        "q_b_proj": "Q4_0",
        "k_b_proj": "Q4_0",
        "v_b_proj": "Q4_0",
        "o_proj": "Q4_0",
    }
    found, exact = (
        PagedRunner(load(path, isq="q4_0", kernels=kernels, kv_dtype="float32").decoder).step(
            {"x": range(40)}
        )["x"]
        for kernels in ("native", "reference")
    )
    assert torch.corrcoef(torch.stack((found.flatten(), exact.flatten())))[0, 1] > 0.99


def test_a_wrong_number_of_heads_is_refused() -> None:
    values = np.zeros((24, 8), np.float32)
    view = View("kv_b", heads=HeadRows(3, 0, 4, 8), transposed=True)
    assert view.shape((24, 8)) == (3, 8, 4)
    assert unpack(view.of(RawTensor({VALUES: values}, "F32", (24, 8)))).shape == (3, 8, 4)
    for shape in ((25, 8), (24,), (3, 8, 8)):
        with pytest.raises(CheckpointError, match="config says 3 heads of 8 rows"):
            view.shape(shape)


def test_all_matrices_must_have_a_matching_row_order() -> None:
    view = View("q_b", RopeRows(2, 5, 4, 1))
    values = np.arange(10, dtype=np.float32)[:, None]
    raw = RawTensor({VALUES: values}, "F32", (10, 1))
    assert unpack(view.of(raw)).ravel().tolist() == [1, 3, 2, 4, 0, 6, 8, 7, 9, 5]
    for shape in ((11, 1), (9, 1), ()):
        with pytest.raises(CheckpointError, match="config says 2 heads of 5 rows"):
            view.shape(shape)


@pytest.mark.parametrize(
    ("arch", "field"),
    [("deepseek_v3", "qk_nope_head_dim"), ("deepseek_v3", "kv_lora_rank"), ("glm4", "head_dim")],
)
def test_large_sizes_in_a_config_allocate_no_memory(arch: str, field: str, tmp_path: Path) -> None:
    """The sizes are compared with the file before anything is allocated."""
    path = write_tiny(tmp_path / "model", arch)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {field: 1 << 28}))
    with pytest.raises(CheckpointError, match=r"model: .* is \[.*config says"):
        load(path)


def test_unsupported_configs_are_refused(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for arch, fields, says in (
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("deepseek_v3", {"scoring_func": "sqrt"}, "scoring_func='sqrt'"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "rope over 7"),
        ("deepseek_v3", {"n_group": 3}, "8 experts cannot be split into 3 groups"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ):
        with subtests.test(arch=arch, says=says):
            tmp_path = tmp_path_factory.mktemp("case")
            config = open_checkpoint(write_tiny(tmp_path, arch)).hf_config
            with pytest.raises(UnsupportedModel, match=says):
                find_spec(config).parse({**config, **fields})
