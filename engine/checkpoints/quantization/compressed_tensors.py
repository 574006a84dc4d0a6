"""Reads compressed-tensors weights (written by llm-compressor): integers and floats of 4 and 8
bits.

The parts of a weight determine its storage; only the block size comes from the config:
`weight_packed` int32 [outputs, inputs / n] with `weight_shape`; int8 or 8-bit float `weight`;
`weight_packed` uint8 with a scale for 16 or 32 inputs. `weight_scale` is [1], [outputs, 1],
[outputs, groups] or [blocks, blocks].
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.checkpoints.quantization import (
    Parts,
    QuantizationMethod,
    choice,
    require,
    size,
)
from pdserve.engine.checkpoints.quantization.fp8 import (
    KV_SCALES,
    block_of,
    float8,
    float8_layout,
)
from pdserve.engine.checkpoints.quantization.gptq import in_order, order_of_groups
from pdserve.engine.checkpoints.source import Layout
from pdserve.engine.weights import Bytes, RawTensor
from pdserve.engine.weights.formats import FP4, INT4, INT8, float4, nibbles
from pdserve.engine.weights.formats.fp4 import mxfp4
from pdserve.engine.weights.formats.grouped import grouped

COMPRESSED = (
    "dense",
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
UNSUPPORTED = ("transform_config", "sparsity_config")
PACKED_INTEGERS = ("weight_packed", "weight_scale", "weight_shape")
NVFP4 = ("weight_packed", "weight_scale", "weight_global_scale")


class CompressedTensors(QuantizationMethod):
    names = ("compressed-tensors",)
    forms = (PACKED_INTEGERS, NVFP4, ("weight_packed", "weight_scale"), ("weight", "weight_scale"))
    optional = ("weight_zero_point", "weight_g_idx")
    unused = (
        *("input_scale", "input_zero_point", "input_global_scale"),
        *("output_scale", "output_zero_point", *KV_SCALES),
        *("k_zero_point", "v_zero_point"),
        *("q_global_scale", "k_global_scale", "v_global_scale"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        choice(config, ("format",), COMPRESSED, "dense")
        for key in UNSUPPORTED:
            setting = config.get(key) or {}
            if setting and setting.get("format") != "dense":
                raise ValueError(f"the setting {key} is not supported")
        schemes = [s.get("weights") or {} for s in (config.get("config_groups") or {}).values()]
        self.quantizes = bool(schemes)
        blocks = [s["block_structure"] for s in schemes if s.get("block_structure")]
        if any(block != blocks[0] for block in blocks):
            raise ValueError(f"different block sizes are not supported: {blocks}")
        self._block = block_of("block_structure", blocks[0] if blocks else None)

    def layout(self, parts: Parts) -> Layout:
        if "weight" in parts:
            weight = parts["weight"]
            if weight.dtype != np.int8:
                return float8_layout(weight)
            if weight.ndim != 2 or 0 in weight.shape:
                raise ValueError(f"weight is {list(weight.shape)}: expected 2 dims")
            return Layout(INT8.name, weight.shape)
        packed = parts["weight_packed"]
        if packed.ndim != 2 or 0 in packed.shape or packed.dtype not in (np.uint8, np.int32):
            actual = f"{packed.dtype} {list(packed.shape)}"
            raise ValueError(f"weight_packed is {actual}: expected int32 or uint8, 2 dims")
        if packed.dtype == np.uint8:
            kind = FP4.name if "weight_global_scale" in parts else "MXFP4"
            return Layout(kind, (packed.shape[0], packed.shape[1] * 2))
        outputs, inputs = _stated_shape(parts)
        for format in (INT4, INT8):
            if packed.shape == (outputs, -(-inputs * format.bits // 32)) and inputs % 2 == 0:
                return Layout(format.name, (outputs, inputs))
        raise ValueError(
            f"weight_packed is {list(packed.shape)} for a weight of {[outputs, inputs]}: "
            "expected integers of 4 or 8 bits"
        )

    def read(self, parts: Parts) -> RawTensor:
        name, (outputs, inputs) = self.layout(parts)
        scale = parts["weight_scale"]
        if name in (FP4.name, "MXFP4"):
            return _float4(parts)
        if name not in (INT4.name, INT8.name):
            return float8(parts["weight"], scale, self._block)
        format = INT4 if name == INT4.name else INT8
        if "weight" in parts:
            codes = parts["weight"].view(np.uint8) ^ np.uint8(128)
        else:
            codes = _bytes(parts["weight_packed"])[:, : inputs * format.bits // 8]
        if scale.size == 1:
            scale = np.broadcast_to(scale.reshape(1, 1), (outputs, 1))
        if scale.ndim != 2 or len(scale) != outputs or not scale.shape[1]:
            raise ValueError(f"scales are {list(scale.shape)} for a weight of {[outputs, inputs]}")
        zeros = _zeros(parts, scale.shape, format.bits)
        columns = None
        group_of = parts.get("weight_g_idx")
        if group_of is not None and (group_of >= 0).any():  # all are -1 without a reordering
            require(parts, "weight_g_idx", np.integer, (inputs,))
            columns = order_of_groups(group_of, max(1, inputs // scale.shape[1]))
        if columns is not None:
            codes = in_order(codes, format.bits, columns)
        return grouped(format, codes, scale, zeros, columns)


def _stated_shape(parts: Parts) -> tuple[int, int]:
    shape = parts["weight_shape"]
    if shape.size != 2 or not np.issubdtype(shape.dtype, np.integer):
        raise ValueError("weight_shape must hold two sizes")
    outputs, inputs = (size("weight_shape", int(value)) for value in shape.reshape(2))
    return outputs, inputs


def _float4(parts: Parts) -> RawTensor:
    """Read a weight of 4-bit floats. Its scales are 8-bit floats, all divided by one number
    (NVFP4), or exponents (MXFP4). Raises ValueError if the parts do not fit together."""
    codes, scale = parts["weight_packed"], parts["weight_scale"]
    if scale.dtype != np.uint8 or scale.ndim != 2:
        raise ValueError(
            f"weight_scale is {scale.dtype} {list(scale.shape)}: expected uint8, 2 dims"
        )
    if "weight_global_scale" not in parts:
        return mxfp4(codes, scale)
    divisor = parts["weight_global_scale"].reshape(-1)
    if divisor.dtype != np.float32 or divisor.size != 1 or not 0 < divisor[0] < np.inf:
        raise ValueError("weight_global_scale must be one float32 above 0")
    return float4(codes, scale, divisor[0])


def _zeros(parts: Parts, shape: tuple[int, ...], bits: int) -> Bytes | None:
    """Return the zero points of a weight as unsigned integers like the weight's codes, uint8
    [outputs, groups]; None if it has none. They are stored as int8, or packed in int32 along the
    outputs."""
    stored = parts.get("weight_zero_point")
    if stored is None:
        return None
    outputs, groups = shape
    if stored.dtype == np.int8 and stored.size in (1, outputs * groups):
        levels = (stored.astype(np.int16) + (1 << bits >> 1)).astype(np.uint8)
        return np.broadcast_to(levels.reshape(-1, groups), shape)
    require(parts, "weight_zero_point", np.int32, (-(-outputs * bits // 32), groups))
    packed = _bytes(stored.T)
    return (nibbles(packed) if bits == 4 else packed)[:, :outputs].T


def _bytes(packed: NDArray[np.int32]) -> Bytes:
    return np.ascontiguousarray(packed).view(np.uint8)


METHOD = CompressedTensors
