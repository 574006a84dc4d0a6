"""compressed-tensors (the files of llm-compressor): integers and floats of 4 and 8 bits.

A weight's parts say how it is stored, so that its group of the config is not needed:
`weight_packed` int32 [outputs, inputs / n] with `weight_shape`; int8 or 8-bit float `weight`;
`weight_packed` uint8 with a scale for 16 or 32 inputs. `weight_scale` is [1], [outputs, 1],
[outputs, groups] or [blocks, blocks].
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.checkpoints.quantization import Parts, QuantizationMethod
from pdserve.engine.checkpoints.quantization.fp8 import float8, float8_layout
from pdserve.engine.checkpoints.quantization.gptq import in_order, order_of_groups
from pdserve.engine.checkpoints.source import Layout
from pdserve.engine.weights.bits import Bytes
from pdserve.engine.weights.format import RawTensor
from pdserve.engine.weights.formats.fp4 import mxfp4
from pdserve.engine.weights.formats.grouped import (
    FP4,
    INT4,
    INT8,
    float4,
    grouped,
    nibbles,
)

FORMATS = (
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
PACKED_SHAPE = ("weight_packed", "weight_scale", "weight_shape")
NVFP4 = ("weight_packed", "weight_scale", "weight_global_scale")


class CompressedTensors(QuantizationMethod):
    names = ("compressed-tensors",)
    forms = (PACKED_SHAPE, NVFP4, ("weight_packed", "weight_scale"), ("weight", "weight_scale"))
    optional = ("weight_zero_point", "weight_g_idx")
    unused = (
        *("input_scale", "input_zero_point", "input_global_scale", "output_scale"),
        *("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        if (kind := config.get("format", "dense")) not in FORMATS:
            raise ValueError(f"format is {kind!r}; known: {', '.join(FORMATS)}")
        for key in UNSUPPORTED:
            given = config.get(key) or {}
            if given and given.get("format") != "dense":
                raise ValueError(f"it has a {key}")
        self._block = (128, 128)
        for scheme in dict(config.get("config_groups") or {}).values():
            if size := (scheme.get("weights") or {}).get("block_structure"):
                self._block = (int(size[0]), int(size[1]))

    def layout(self, parts: Parts) -> Layout:
        if "weight" in parts:
            if parts["weight"].dtype == np.int8:
                return Layout(INT8.name, parts["weight"].shape)
            return float8_layout(parts["weight"])
        packed = parts["weight_packed"]
        if packed.ndim != 2 or len(packed) == 0:
            raise ValueError(f"weight_packed is {list(packed.shape)}: want 2 dims")
        if packed.dtype == np.uint8:
            kind = FP4.name if "weight_global_scale" in parts else "MXFP4"
            return Layout(kind, (packed.shape[0], packed.shape[1] * 2))
        outputs, inputs = _given_shape(parts)
        for format in (INT4, INT8):
            if packed.shape == (outputs, -(-inputs * format.bits // 32)):
                return Layout(format.name, (outputs, inputs))
        raise ValueError(
            f"weight_packed is {list(packed.shape)} for a weight of {[outputs, inputs]}: "
            "want integers of 4 or 8 bits"
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
        zeros = parts.get("weight_zero_point")
        if zeros is not None:
            zeros = _zeros(zeros, outputs, format.bits)
        if scale.size == 1:
            scale = np.broadcast_to(scale.reshape(1, 1), (outputs, 1))
            zeros = None if zeros is None else np.broadcast_to(zeros.reshape(1, 1), (outputs, 1))
        columns = None
        group_of = parts.get("weight_g_idx")
        if group_of is not None and (group_of >= 0).any():  # all are -1 where there is no order
            columns = order_of_groups(group_of, inputs // scale.shape[1])
        if columns is not None:
            codes = in_order(codes, format.bits, columns)
        return grouped(format, codes, scale, zeros, columns)


def _given_shape(parts: Parts) -> tuple[int, int]:
    given = parts.get("weight_shape")
    if given is None or given.size != 2:
        raise ValueError("weight_shape must hold two sizes")
    outputs, inputs = (int(size) for size in given.reshape(2))
    return outputs, inputs


def _float4(parts: Parts) -> RawTensor:
    """Scales are 8-bit floats over a number for all (NVFP4), or bytes of exponents (MXFP4)."""
    codes, scale = parts["weight_packed"], parts["weight_scale"]
    if scale.dtype != np.uint8 or scale.ndim != 2:
        raise ValueError(f"weight_scale is {scale.dtype} {list(scale.shape)}: want bytes, 2 dims")
    if "weight_global_scale" in parts:
        whole = parts["weight_global_scale"].reshape(-1)[0].astype(np.float32)
        return float4(codes, scale, whole)
    return mxfp4(codes, scale)


def _zeros(stored: NDArray[Any], outputs: int, bits: int) -> Bytes:
    """[outputs, groups], as many above zero as codes are: int8 as it is, or packed in int32 along
    the outputs."""
    if stored.dtype == np.int8:
        return (stored.astype(np.int16) + (1 << bits >> 1)).astype(np.uint8)
    packed = _bytes(stored.T)
    return (nibbles(packed) if bits == 4 else packed)[:, :outputs].T


def _bytes(packed: NDArray[np.int32]) -> Bytes:
    return np.ascontiguousarray(packed).view(np.uint8)


METHOD = CompressedTensors
