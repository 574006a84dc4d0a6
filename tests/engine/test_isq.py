"""--isq: a model quantized at load equals the one that `pdserve quantize` writes."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.engine_kit import ask, run, tokens
from builders.tiny_models import write_tiny
from builders.write_gguf import write_gguf

from pdserve.engine.api import EngineConfig
from pdserve.engine.architectures import find_spec
from pdserve.engine.build import build_engine
from pdserve.engine.checkpoints import CheckpointError, WeightLoader
from pdserve.engine.checkpoints.gguf import quantize_gguf
from pdserve.engine.checkpoints.gguf.mapping import tensor_role
from pdserve.engine.load import isq_formats, load_model, open_checkpoint
from pdserve.engine.models import tensor_shapes
from pdserve.engine.weights import BLOCKS, TYPES, MatrixRole

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
}
MIXTURE = {**WIDE, "num_experts": 4, "moe_intermediate_size": 288}

LATENT = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "v_head_dim": 256,
    "moe_intermediate_size": 288,
}


def load(model: Path, **options: Any) -> Any:
    return load_model(EngineConfig(model=str(model), **options), lambda what, fraction: None)


def held(model: Path, type: str = "") -> dict[str, Any]:
    """Return all tensors in the form given to a decoder."""
    opened = open_checkpoint(model)
    spec = find_spec(opened.hf_config)
    config = spec.parse(opened.hf_config)
    checkpoint = spec.view(opened, config)
    quantized = isq_formats(type, config, checkpoint) if type else {}
    shapes = tensor_shapes(config)
    with WeightLoader(
        checkpoint, shapes, None, 2, False, False, lambda fraction: None, quantized
    ) as weights:
        return {name: weights(name) for name in shapes}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return a directory and the GGUF of the same weights, by architecture."""
    folder = tmp_path_factory.mktemp("models")
    made = {}
    for arch, sizes in (
        ("llama", WIDE),
        ("qwen3_moe", MIXTURE),
        ("phi3", WIDE),
        ("deepseek_v3", LATENT),
    ):
        path = write_tiny(folder / arch, arch, seed=2, **sizes)
        made[arch] = (path, write_gguf(path, folder / f"{arch}.gguf"))
    return made


# A type's quantizer treats every matrix alike, so one architecture covers all types. The others
# cover the types whose mixes distinguish the roles of matrices, Q8_0, whose mix does not, and one
# of the types of 32 values, whose mixes are alike.
PAIRS = [
    *(("llama", type) for type in TYPES),
    *((arch, type) for arch in ("qwen3_moe", "phi3", "deepseek_v3")
      for type in ("q2k", "q3k", "q4k", "q8_0")),
    ("qwen3_moe", "q5_1"),
    ("phi3", "q4_1"),
    ("deepseek_v3", "q5_0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "type"),
    [
        pytest.param(*pair, marks=pytest.mark.extended if pair[1] in ("q2k", "q3k") else ())
        for pair in PAIRS
    ],
)
def test_weights_equal_those_of_the_written_file(
    models: dict[str, tuple[Path, Path]], arch: str, type: str, tmp_path: Path
) -> None:
    directory, plain = models[arch]
    seen: list[float] = []
    counted = quantize_gguf(plain, tmp_path / "out.gguf", type, seen.append)
    at_load, written = held(directory, type), held(tmp_path / "out.gguf")
    formats: Counter[str] = Counter()
    for name, raw in at_load.items():
        assert raw.format == written[name].format, name
        formats[raw.format] += 1
        if raw.format != "F32":
            np.testing.assert_array_equal(raw.parts[BLOCKS], written[name].parts[BLOCKS], name)
    assert formats[TYPES[type]] >= 5
    assert counted[TYPES[type]] >= 5
    assert seen == sorted(seen)
    assert seen[-1] == 1
    with pytest.raises(FileExistsError):
        quantize_gguf(plain, tmp_path / "out.gguf", type, seen.append)
    with pytest.raises(CheckpointError, match=r"nothing to quantize \(F32, "):
        quantize_gguf(tmp_path / "out.gguf", tmp_path / "again.gguf", type, seen.append)
    assert [file.name for file in tmp_path.iterdir()] == ["out.gguf"]


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize(("arch", "type"), [("llama", "q4k"), ("qwen3_moe", "q5_1")])
def test_answers_equal_those_of_the_written_file(
    models: dict[str, tuple[Path, Path]], kernels: str, arch: str, type: str, tmp_path: Path
) -> None:
    directory, plain = models[arch]
    quantize_gguf(plain, tmp_path / "out.gguf", type, lambda fraction: None)
    answers = []
    for model, isq in ((directory, type), (tmp_path / "out.gguf", "")):
        options = EngineConfig(model=str(model), isq=isq, kernels=kernels, kv_tokens=512)
        engine, _ = build_engine(options)
        answers.append(tokens(run(engine, ask("x", list(range(40)), max_tokens=24))))
    assert answers[0] == answers[1]


def test_the_digest_differs_from_that_of_the_stored_model(
    models: dict[str, tuple[Path, Path]],
) -> None:
    directory, _ = models["llama"]
    cards = [load(directory, isq=type).card for type in ("", "q4k", "Q4_K", "q8", "q4k")]
    stored, first, alias, other, again = (card.weights_digest for card in cards)
    assert first == alias == again
    assert len({stored, first, other}) == 3
    assert [card.quantization for card in cards[:2]] == ["float32", "Q4_K"]


def test_quantized_weights_may_be_expanded(models: dict[str, tuple[Path, Path]]) -> None:
    """The values equal those of the quantized blocks."""
    directory, _ = models["llama"]
    ids = list(range(40))
    answers = []
    for weights in ("auto", "float32"):
        options = EngineConfig(
            model=str(directory), isq="q4_0", kernels="reference", weights=weights, kv_tokens=512
        )
        engine, _ = build_engine(options)
        answers.append(tokens(run(engine, ask("x", ids, max_tokens=24))))
    assert answers[0] == answers[1]


def test_routers_and_vectors_are_not_quantized(models: dict[str, tuple[Path, Path]]) -> None:
    raws = held(models["qwen3_moe"][0], "q4_0")
    plain = {name for name, raw in raws.items() if raw.format == "F32"}
    assert all("norm" in name or name.endswith("mlp.gate.weight") for name in plain)
    assert sum(name.endswith("mlp.gate.weight") for name in plain) == WIDE["num_hidden_layers"]


def test_rows_that_do_not_fit_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows of 288 columns become Q8_0; rows of 40 columns are not quantized."""
    sizes = {**WIDE, "intermediate_size": 288, "num_attention_heads": 2, "head_dim": 20}
    path = write_tiny(tmp_path / "odd", "qwen3", seed=2, **sizes)
    with caplog.at_level(logging.INFO):
        raws = held(path, "q4k")
    assert raws["model.layers.0.mlp.down_proj.weight"].format == "Q8_0"
    assert raws["model.layers.0.self_attn.o_proj.weight"].format == "F32"
    assert raws["model.layers.0.mlp.up_proj.weight"].format == "Q4_K"
    assert "288 columns do not fit Q4_K: Q8_0" in caplog.text
    assert "40 columns do not fit Q4_K: as stored" in caplog.text


def test_fused_matrices_are_quantized_by_their_role(
    models: dict[str, tuple[Path, Path]],
) -> None:
    """A matrix with q, k and v gets the format of v, as in the written file."""
    raws = held(models["phi3"][0], "q3k")
    formats = {name.split(".")[-2]: raw.format for name, raw in raws.items() if ".1." in name}
    assert formats["q_proj"] == formats["k_proj"] == formats["v_proj"] == "Q5_K"
    assert formats["gate_proj"] == formats["up_proj"] == "Q3_K"
    apart = held(models["llama"][0], "q3k")["model.layers.1.self_attn.q_proj.weight"]
    assert apart.format == "Q3_K"


def test_unknown_types_and_quantized_models_are_refused(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    directory, plain = models["llama"]
    with pytest.raises(ValueError, match="'q9' is not supported; supported: q4_0"):
        load(directory, isq="q9")
    quantize_gguf(plain, tmp_path / "out.gguf", "q8_0", lambda fraction: None)
    with pytest.raises(
        CheckpointError, match=r"out.gguf: --isq q4k: the model has nothing .*\(Q8_0\)"
    ):
        load(tmp_path / "out.gguf", isq="q4k")


def test_a_nonfinite_weight_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = write_tiny(tmp_path / "model", "llama", **WIDE)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name][3, 5] = torch.inf
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {name}: a value is not finite"):
        load(path, isq="q4_0")
    plain = write_gguf(path, tmp_path / "plain.gguf")
    with pytest.raises(CheckpointError, match=r"tensor blk.2.ffn_up.weight: a value is not finite"):
        quantize_gguf(plain, tmp_path / "out.gguf", "q4_0", lambda fraction: None)
    assert not (tmp_path / "out.gguf").exists()


def test_the_role_of_a_gguf_tensor(subtests: pytest.Subtests) -> None:
    for name, placed in (
        ("token_embd.weight", (MatrixRole.HEAD, 0)),
        ("blk.12.attn_v.weight", (MatrixRole.VALUE, 12)),
        ("blk.3.ffn_down_exps.weight", (MatrixRole.DOWN, 3)),
        ("blk.3.ffn_down.7.weight", (MatrixRole.DOWN, 3)),  # in Mixtral's first files
        ("blk.3.attn_q.weight", (MatrixRole.OTHER, 3)),
        ("blk.3.attn_qkv.weight", (MatrixRole.VALUE, 3)),
        ("blk.3.ffn_gate_inp.weight", None),
        ("blk.3.ssm_in.weight", None),
        ("blk.3.attn_norm.weight", None),
        ("blk.3.attn_q.bias", None),
        ("rope_freqs.weight", None),
        ("blk.weight", None),
        ("blk.x.attn_q.weight", None),
        ("v.patch_embd.weight", None),
    ):
        with subtests.test(name):
            assert tensor_role(name, tied=True) == placed


def test_a_split_model_becomes_one_file(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model", "llama", **WIDE)
    first = write_gguf(path, tmp_path / "split.gguf", max_tensors_per_part=9)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) > 2
    assert first in parts
    quantize_gguf(parts[1], tmp_path / "out.gguf", "q4_0", lambda fraction: None)
    at_load, written = held(path, "q4_0"), held(tmp_path / "out.gguf")
    for name, raw in at_load.items():
        if raw.format != "F32":
            np.testing.assert_array_equal(raw.parts[BLOCKS], written[name].parts[BLOCKS], name)
