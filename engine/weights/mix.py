"""Chooses the format of each matrix when a model is quantized to a type such as q4k; pure.

A type is a mix of formats, the same as llama.cpp's mix of that name (src/llama-quant.cpp): matrices
whose errors cost most get more bits. Q3_K, Q4_K and Q5_K are llama.cpp's _M mixes. A matrix whose
rows are not whole blocks of its format gets FALLBACK.
"""

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from pdserve.engine.weights.format import PLAIN

TYPES = {name.lower(): name for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")} | {
    f"q{bits}k": f"Q{bits}_K" for bits in range(2, 7)
}
ALIASES = {"q4": "q4_0", "q5": "q5_0", "q8": "q8_0"} | {
    f"q{bits}_k{mix}": f"q{bits}k" for bits in range(2, 7) for mix in ("", "_m" * (2 < bits < 6))
}
FALLBACK = "Q8_0"  # for rows that are not a multiple of a type's block
BLOCK_VALUES = {name: 256 if name.endswith("K") else 32 for name in TYPES.values()}
LAYERS_OF_70B = 80  # Llama 2 and 3 70B, Qwen 2.5 72B


class MatrixRole(Enum):
    """The role of a matrix in a model, on which its format depends."""

    HEAD = "head"  # or a tied embedding
    KEY = "k"
    VALUE = "v"  # or fused q, k and v
    OUTPUT = "attention's output"
    DOWN = "down"
    OTHER = "other"


class StoredMatrix(NamedTuple):
    """A matrix, or a stack of matrices, of the model to quantize, with the format in which it is
    stored."""

    name: str
    role: MatrixRole
    layer: int
    format: str
    columns: int


class Mix(NamedTuple):
    """A quantization type, and the properties of a model on which its choice of formats depends."""

    type: str  # one of TYPES
    num_layers: int
    n_gqa: int  # query heads per kv head
    num_experts: int  # per layer; 0: not a mixture of experts

    def preferred_format(self, role: MatrixRole, layer: int) -> str:
        """Return the format that the mix chooses for a matrix, whether or not the matrix's rows are
        whole blocks of it."""
        main = TYPES[self.type]
        if main == "Q8_0":
            return main
        if role is MatrixRole.HEAD:
            return "Q6_K"
        if self.num_experts == 8:  # Mixtral: attention is small compared with the experts
            if role in (MatrixRole.KEY, MatrixRole.VALUE):
                return "Q8_0"
            if role is MatrixRole.OUTPUT:
                return "Q5_K" if main in ("Q2_K", "Q3_K", "Q4_K") else main
        if role is MatrixRole.VALUE:
            format = self._value_format(main, layer)
            gets_more = self.num_layers == LAYERS_OF_70B and self.n_gqa > 1  # v is small there
            return "Q5_K" if gets_more and format in ("Q3_K", "Q4_K") else format
        match main, role:
            case "Q2_K", MatrixRole.OUTPUT | MatrixRole.DOWN:
                return "Q3_K"
            case "Q3_K", MatrixRole.DOWN:
                return "Q5_K" if layer < self.num_layers // 16 else "Q4_K"
            case "Q3_K", MatrixRole.OUTPUT:
                return "Q4_K"
            case "Q4_K" | "Q5_K", MatrixRole.DOWN if self._is_costly(layer):
                return "Q6_K"
        return main

    def _value_format(self, main: str, layer: int) -> str:
        match main:
            case "Q2_K":
                return "Q4_K" if self.n_gqa >= 4 else "Q3_K"
            case "Q3_K":
                return "Q5_K" if layer < 2 else "Q4_K"
            case "Q4_K" | "Q5_K" if self._is_costly(layer):
                return "Q6_K"
        return main

    def _is_costly(self, layer: int) -> bool:
        """Return whether errors in a layer cost most, so that it gets more bits: it is in the first
        or last eighth of the layers, or every third layer in between."""
        eighth, last = self.num_layers // 8, 7 * self.num_layers // 8
        return layer < eighth or layer >= last or (layer - eighth) % 3 == 2

    def plan(self, matrices: Iterable[StoredMatrix]) -> "FormatPlan":
        """Choose the formats of a model's matrices; matrices that are already quantized keep
        theirs."""
        plan = FormatPlan({}, Counter(), Counter())
        for name, role, layer, stored, columns in matrices:
            if stored not in PLAIN:
                plan.kept[stored] += 1
                continue
            preferred = self.preferred_format(role, layer)
            format = fitting(preferred, columns)
            if format != preferred:
                plan.unfit[
                    f"{columns} columns do not fit {preferred}: {format or 'as stored'}"
                ] += 1
            if format:
                plan.formats[name] = format
        return plan


class FormatPlan(NamedTuple):
    """The matrices to quantize with their new formats, and counts of the matrices that keep their
    format or do not fit the preferred one."""

    formats: dict[str, str]  # new formats by matrix name
    unfit: Counter[str]  # number of matrices by misfit of their rows
    kept: Counter[str]  # number of matrices that are already quantized, by format


def find_type(name: str) -> str:
    """Return the quantization type, a key of TYPES, for a name or alias. Raises ValueError, which
    lists the known names."""
    key = name.lower()
    key = ALIASES.get(key, key)
    if key not in TYPES:
        raise ValueError(
            f"quantization type {name!r} is not supported; supported: {', '.join(TYPES)}"
        )
    return key


def fitting(format: str, columns: int) -> str | None:
    """Return `format` if rows of `columns` values are whole blocks of it, else FALLBACK if they are
    whole blocks of that, else None."""
    return next((f for f in (format, FALLBACK) if columns % BLOCK_VALUES[f] == 0), None)
