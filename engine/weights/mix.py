"""Which format each matrix gets when a model is quantized to a type; pure.

A type is a mix, as llama.cpp's of the same name is (src/llama-quant.cpp): the matrices whose error
costs most get more bits. Q3_K, Q4_K and Q5_K are its _M mixes.
"""

from enum import Enum
from typing import NamedTuple

TYPES = {name.lower(): name for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")} | {
    f"q{bits}k": f"Q{bits}_K" for bits in range(2, 7)
}
ALIASES = {"q4": "q4_0", "q5": "q5_0", "q8": "q8_0"} | {
    f"q{bits}_k{mix}": f"q{bits}k" for bits in range(2, 7) for mix in ("", "_m" * (2 < bits < 6))
}
FALLBACK = "Q8_0"  # for rows that are no multiple of a type's block
BLOCK_VALUES = {name: 256 if name.endswith("K") else 32 for name in TYPES.values()}
MANY_HEADS = 4  # so many query heads share a value head: its matrix is small


class MatrixRole(Enum):
    """What a matrix does."""

    HEAD = "head"  # or a tied embedding
    KEY = "k"
    VALUE = "v"
    QKV = "q, k and v in one"
    OUTPUT = "attention's output"
    DOWN = "down"
    OTHER = "other"


class ModelSize(NamedTuple):
    """What a mix depends on."""

    num_layers: int
    shared_heads: int  # query heads of one kv head
    has_experts: bool


def find_type(name: str) -> str:
    """The type of that name or alias, as TYPES has it. Raises ValueError with the known names."""
    found = name.lower()
    found = ALIASES.get(found, found)
    if found not in TYPES:
        raise ValueError(f"quantization type {name!r} is not known; known: {', '.join(TYPES)}")
    return found


def mixed(type: str, role: MatrixRole, layer: int, model: ModelSize) -> str:
    """The format of one matrix in a model of `type`, if its rows fit."""
    main = TYPES[type]
    if main == "Q8_0":
        return main
    if role is MatrixRole.HEAD:
        return "Q6_K"
    if role in (MatrixRole.KEY, MatrixRole.VALUE) and model.has_experts:  # small beside the experts
        return "Q8_0"
    if role is MatrixRole.OUTPUT and model.has_experts and main in ("Q2_K", "Q3_K", "Q4_K"):
        return "Q5_K"
    match main, role:
        case "Q2_K", MatrixRole.VALUE:
            return "Q4_K" if model.shared_heads >= MANY_HEADS else "Q3_K"
        case "Q2_K", MatrixRole.OUTPUT | MatrixRole.DOWN:
            return "Q3_K"
        case "Q3_K", MatrixRole.VALUE:
            return "Q5_K" if layer < 2 else "Q4_K"
        case "Q3_K", MatrixRole.DOWN:
            return "Q5_K" if layer < model.num_layers // 16 else "Q4_K"
        case "Q3_K", MatrixRole.OUTPUT | MatrixRole.QKV:
            return "Q4_K"
        case "Q4_K", MatrixRole.QKV:
            return "Q5_K"
        case "Q5_K", MatrixRole.QKV:
            return "Q6_K"
        case "Q4_K" | "Q5_K", MatrixRole.VALUE | MatrixRole.DOWN if _costly(layer, model):
            return "Q6_K"
    return main


def fitting(format: str, columns: int) -> str | None:
    """The format, or the one for rows that do not fit it; None: rows of `columns` fit neither."""
    return next((f for f in (format, FALLBACK) if columns % BLOCK_VALUES[f] == 0), None)


def _costly(layer: int, model: ModelSize) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    eighth, last = model.num_layers // 8, 7 * model.num_layers // 8
    return layer < eighth or layer >= last or (layer - eighth) % 3 == 2
