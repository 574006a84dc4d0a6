"""Reads weights of 8-bit floats (e4m3) with one scale per weight, per output, or per block.

The fine-grained FP8 of DeepSeek and transformers stores `weight_scale_inv`, others `weight_scale`;
a stored value is multiplied by either.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.checkpoints.quantization import Parts, QuantizationMethod, choice, size
from pdserve.engine.checkpoints.source import Layout
from pdserve.engine.weights import RawTensor
from pdserve.engine.weights.formats import FP8, even_groups
from pdserve.engine.weights.formats.grouped import grouped

WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale")  # in files that quantize the KV cache


class Fp8(QuantizationMethod):
    names = ("fp8", "fbgemm_fp8")
    forms = tuple(("weight", scale) for scale in WEIGHT_SCALES)
    unused = ("input_scale", "input_scale_ub", "activation_scale", *KV_SCALES)

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._block = block_of("weight_block_size", config.get("weight_block_size"))
        choice(config, ("fmt",), ("e4m3", "float8_e4m3fn"), "e4m3")

    def layout(self, parts: Parts) -> Layout:
        return float8_layout(parts["weight"])

    def read(self, parts: Parts) -> RawTensor:
        (scale,) = (parts[name] for name in WEIGHT_SCALES if name in parts)
        return float8(parts["weight"], scale, self._block)


def block_of(name: str, value: Any) -> tuple[int, int]:
    """Return (outputs, inputs) of the blocks that share a scale, from the setting `name`; 128 x 128
    if it is None. Raises ValueError for a malformed setting."""
    if value is None:
        return 128, 128
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{name} is {value!r}: expected two sizes")
    return size(name, value[0]), size(name, value[1])


def float8_layout(weight: NDArray[Any]) -> Layout:
    """Return the layout of a weight stored as 8-bit floats. Raises ValueError for other stored
    types."""
    if weight.dtype in (np.float32, np.float16, np.uint16):
        raise ValueError("the weight has a scale but is not quantized")
    if weight.ndim != 2 or weight.dtype != np.uint8 or 0 in weight.shape:
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)}: expected 8-bit floats, 2 dims"
        )
    return Layout(FP8.name, (weight.shape[0], weight.shape[1]))


def float8(weight: NDArray[np.uint8], scale: NDArray[Any], block: tuple[int, int]) -> RawTensor:
    """Return a weight of 8-bit floats with its scales. `scale` has one number, one per output, or
    one per block of (outputs, inputs). Raises ValueError if it has another shape."""
    outputs, inputs = float8_layout(weight).shape
    blocks = (-(-outputs // block[0]), -(-inputs // block[1]))
    if scale.size == 1:
        scales = np.broadcast_to(scale.reshape(1, 1), (outputs, 1))
    elif scale.shape in ((outputs,), (outputs, 1)):
        scales = scale.reshape(outputs, 1)
    elif scale.shape == blocks:
        scales = even_groups(scale, block[1], inputs)[np.arange(outputs) // block[0]]
    else:
        raise ValueError(f"scale is {list(scale.shape)} for a weight of {[outputs, inputs]}")
    return grouped(FP8, weight, scales)


METHOD = Fp8
