"""Floats of 8 bits (e4m3) with a scale for the weight, for each output, or for each block of it.

DeepSeek's and transformers' fine-grained FP8 stores `weight_scale_inv`, others `weight_scale`;
both are what a stored value is multiplied by.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.checkpoints.quantization import Parts, QuantizationMethod
from pdserve.engine.checkpoints.source import Layout
from pdserve.engine.weights.format import RawTensor
from pdserve.engine.weights.formats.grouped import FP8, even_groups, grouped

SCALES = ("weight_scale_inv", "weight_scale")


class Fp8(QuantizationMethod):
    names = ("fp8", "fbgemm_fp8")
    forms = tuple(("weight", scale) for scale in SCALES)
    unused = ("input_scale", "input_scale_ub", "activation_scale", "k_scale", "v_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        block = config.get("weight_block_size") or (128, 128)
        if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
            raise ValueError(f"weight_block_size is {block!r}: want two sizes")
        self._block = (block[0], block[1])
        if (kind := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
            raise ValueError(f"fmt is {kind!r}: want e4m3")

    def layout(self, parts: Parts) -> Layout:
        return float8_layout(parts["weight"])

    def read(self, parts: Parts) -> RawTensor:
        (scale,) = (parts[name] for name in SCALES if name in parts)
        return float8(parts["weight"], scale, self._block)


def float8_layout(weight: NDArray[Any]) -> Layout:
    """Of a stored weight of 8-bit floats. Raises ValueError if it is none."""
    if weight.ndim != 2 or weight.dtype != np.uint8:
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)}: want 8-bit floats, 2 dims"
        )
    return Layout(FP8.name, (weight.shape[0], weight.shape[1]))


def float8(weight: NDArray[np.uint8], scale: NDArray[Any], block: tuple[int, int]) -> RawTensor:
    """The weight, whose scale has one number, one for each output, or one for each block of
    (outputs, inputs). Raises ValueError for another shape."""
    outputs, inputs = float8_layout(weight).shape
    blocks = (-(-outputs // block[0]), -(-inputs // block[1]))
    if scale.size == 1:
        scales = np.broadcast_to(scale.reshape(1, 1), (outputs, 1))
    elif scale.shape in ((outputs,), (outputs, 1)):
        scales = scale.reshape(outputs, 1)
    elif scale.shape == blocks:
        scales = even_groups(scale, block[1], inputs)[np.arange(outputs) // block[0]]
    else:
        raise ValueError(f"its scale is {list(scale.shape)} for a weight of {[outputs, inputs]}")
    return grouped(FP8, weight, scales)


METHOD = Fp8
