"""Which format a matrix gets, beside what llama.cpp's mixes give it."""

import gguf
import pytest

from pdserve.engine.weights.formats import formats
from pdserve.engine.weights.mix import (
    BLOCK_VALUES,
    TYPES,
    MatrixRole,
    ModelSize,
    find_type,
    fitting,
    mixed,
)
from pdserve.engine.weights.quantize import QUANTIZED

DENSE = ModelSize(num_layers=16, shared_heads=3, has_experts=False)
MIXTURE = ModelSize(num_layers=16, shared_heads=4, has_experts=True)


def test_every_type_can_be_quantized_to() -> None:
    assert set(TYPES.values()) == QUANTIZED
    for name, values in BLOCK_VALUES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0] == values
        assert name in formats()


@pytest.mark.parametrize(
    ("name", "type"),
    [("q4", "q4_0"), ("Q8", "q8_0"), ("Q4_K", "q4k"), ("q4_k_m", "q4k"), ("q6_k", "q6k")]
    + [(name, name) for name in TYPES],
)
def test_names(name: str, type: str) -> None:
    assert find_type(name) == type


@pytest.mark.parametrize("name", ["", "q4_k_s", "q6_k_m", "q1", "iq4_nl", "f16", "q4_2"])
def test_names_that_are_not_known(name: str) -> None:
    with pytest.raises(ValueError, match=r"not known; known: q4_0, q4_1, .*q6k$"):
        find_type(name)


@pytest.mark.parametrize("type", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q6k"])
def test_types_of_one_format_but_for_the_head(type: str) -> None:
    for role in MatrixRole:
        head = "Q8_0" if type == "q8_0" else "Q6_K"
        assert mixed(type, role, 5, DENSE) == (head if role is MatrixRole.HEAD else TYPES[type])


def layers_of(type: str, role: MatrixRole, format: str, model: ModelSize = DENSE) -> list[int]:
    return [n for n in range(model.num_layers) if mixed(type, role, n, model) == format]


def test_the_costly_matrices_of_k_types_get_more_bits() -> None:
    for type in ("q4k", "q5k"):
        for role in (MatrixRole.VALUE, MatrixRole.DOWN):  # in llama.cpp's use_more_bits(n, 16)
            assert layers_of(type, role, "Q6_K") == [0, 1, 4, 7, 10, 13, 14, 15]
        assert layers_of(type, MatrixRole.OUTPUT, TYPES[type]) == list(range(16))
    assert layers_of("q3k", MatrixRole.VALUE, "Q5_K") == [0, 1]
    assert layers_of("q3k", MatrixRole.DOWN, "Q5_K") == [0]
    assert layers_of("q3k", MatrixRole.OUTPUT, "Q4_K") == list(range(16))
    assert layers_of("q2k", MatrixRole.VALUE, "Q3_K") == list(range(16))
    assert layers_of("q2k", MatrixRole.VALUE, "Q4_K", DENSE._replace(shared_heads=4)) == list(
        range(16)
    )
    assert mixed("q4k", MatrixRole.QKV, 3, DENSE) == "Q5_K"
    assert mixed("q5k", MatrixRole.QKV, 3, DENSE) == "Q6_K"


def test_attention_beside_experts_is_small() -> None:
    assert (
        mixed("q2k", MatrixRole.VALUE, 3, MIXTURE)
        == mixed("q4_0", MatrixRole.KEY, 3, MIXTURE)
        == "Q8_0"
    )
    assert mixed("q4k", MatrixRole.OUTPUT, 3, MIXTURE) == "Q5_K"
    assert mixed("q4k", MatrixRole.OTHER, 3, MIXTURE) == "Q4_K"


def test_rows_that_do_not_fit() -> None:
    assert fitting("Q4_K", 512) == "Q4_K"
    assert fitting("Q4_K", 576) == "Q8_0"
    assert fitting("Q4_0", 576) == "Q4_0"
    assert fitting("Q4_0", 40) is None
