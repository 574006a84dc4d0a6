"""The format that each matrix gets, compared with llama.cpp's mixes."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import gguf
import pytest

from pdserve.engine.checkpoints.gguf.writer import new_formats
from pdserve.engine.checkpoints.source import Layout
from pdserve.engine.weights import TYPES, find_type
from pdserve.engine.weights.convert import QUANTIZED
from pdserve.engine.weights.formats import formats
from pdserve.engine.weights.mix import BLOCK_VALUES, fitting

GOLDEN = json.loads((Path(__file__).parent / "golden_mixes.json").read_text())


def test_every_type_is_a_quantization_target() -> None:
    assert set(TYPES.values()) == QUANTIZED
    for name, values in BLOCK_VALUES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0] == values
        assert name in formats()


def test_type_names_and_aliases(subtests: pytest.Subtests) -> None:
    aliases = {"q4": "q4_0", "Q8": "q8_0", "Q4_K": "q4k", "q4_k_m": "q4k", "q6_k": "q6k"}
    for name, type in {**aliases, **{name: name for name in TYPES}}.items():
        with subtests.test(name):
            assert find_type(name) == type


def test_unknown_type_names_are_refused(subtests: pytest.Subtests) -> None:
    for name in ("", "q4_k_s", "q6_k_m", "q1", "iq4_nl", "f16", "q4_2"):
        with (
            subtests.test(name=name),
            pytest.raises(ValueError, match=r"not supported; supported: q4_0, q4_1, .*q6k$"),
        ):
            find_type(name)


def test_mixes_equal_those_of_llama_cpp(subtests: pytest.Subtests) -> None:
    """The table is the output of llama-quantize; tools/tables/golden_mixes.py contains the
    command."""
    for type, model in product(TYPES, GOLDEN):
        with subtests.test(type=type, model=model):
            metadata, shapes, formats = GOLDEN[model].values()
            num_layers = metadata[f"{metadata['general.architecture']}.block_count"]
            expected = {
                place: format
                for name, runs in formats[type].items()
                for place, format in in_layers(name, runs, num_layers)
            }
            stored = {
                name: Layout("F32", tuple(shapes[kind]))
                for kind in shapes
                for name, _ in in_layers(kind, "0:F32", num_layers)
                if name in expected  # leading layers have no experts
            }
            assert stored.keys() == expected.keys()
            made = new_formats(type, metadata, stored)
            assert {name: made.get(name, "F32") for name in stored} == expected
            if type == "q4k":
                assert "Q6_K" in expected.values()


def in_layers(name: str, runs: str, num_layers: int) -> Iterator[tuple[str, str]]:
    """Yield a name and format per layer, or for `name` itself if it belongs to no layer."""
    begins = {int(layer): format for layer, format in (run.split(":") for run in runs.split())}
    format = ""
    for n in range(num_layers if "{n}" in name else 1):
        format = begins.get(n, format)
        if format != "-":
            yield name.replace("{n}", str(n)), format


def test_unknown_matrices_are_copied(subtests: pytest.Subtests) -> None:
    for name, is_known in (
        ("attn_q", True),
        ("attn_qkv", True),
        ("ffn_gate_exps", True),
        ("ffn_gate_inp", False),
        ("ffn_gate_inp_shexp", False),
        ("ssm_conv1d", False),
        ("ssm_in", False),
        ("time_mix_w1", False),
        ("attn_rel_b", False),
        ("laurel_l", False),
        ("altup_correct_coef", False),
        ("per_layer_model_proj", False),
        ("shortconv.conv", False),
        ("indexer.attn_k", False),
    ):
        with subtests.test(name=name, is_known=is_known):
            stored = {
                f"blk.0.{name}.weight": Layout("F16", (8, 256)),
                "blk.0.attn_k.weight": Layout("F16", (8, 256)),
            }
            made = new_formats("q4_0", {"general.architecture": "some"}, stored)
            assert (f"blk.0.{name}.weight" in made) == is_known
            assert "blk.0.attn_k.weight" in made


def test_rows_that_do_not_fit_get_another_format() -> None:
    assert fitting("Q4_K", 512) == "Q4_K"
    assert fitting("Q4_K", 576) == "Q8_0"
    assert fitting("Q4_0", 576) == "Q4_0"
    assert fitting("Q4_0", 40) is None
