"""GPTQ (arXiv:2210.17323): integers packed along the inputs of a weight, 32 bits at a time.

`qweight` int32 [inputs / n, outputs], `qzeros` int32 [groups, outputs / n], `scales` [groups,
outputs], `g_idx` int32 [inputs] the group of each input; n integers in 32 bits, the first lowest.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.checkpoints.quantization import Parts, QuantizationMethod, choice
from pdserve.engine.checkpoints.source import Layout
from pdserve.engine.weights.bits import Bytes
from pdserve.engine.weights.format import RawTensor
from pdserve.engine.weights.formats.grouped import (
    INT4,
    INT8,
    even_groups,
    grouped,
    nibbles,
    packed_nibbles,
)

KINDS = ("gptq", "gptq_v2")  # checkpoint_format


class Gptq(QuantizationMethod):
    names = ("gptq",)
    forms = (("qweight", "qzeros", "scales"),)
    optional = ("g_idx",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._format = {4: INT4, 8: INT8}[choice(config, ("bits",), (4, 8))]
        group = config.get("group_size", -1)
        if type(group) is not int or not (group == -1 or group > 0):
            raise ValueError(f"group_size is {group!r}: want a number of inputs, or -1")
        self._group = group
        kind = choice({"checkpoint_format": "gptq", **config}, ("checkpoint_format",), KINDS)
        self._below = 1 if kind == "gptq" else 0  # how far stored zeros are below the real ones
        if config.get("dynamic"):
            raise ValueError("it has settings for single modules (dynamic)")

    def layout(self, parts: Parts) -> Layout:
        packed = parts["qweight"]
        if packed.ndim != 2 or packed.dtype != np.int32:
            raise ValueError(f"qweight is {packed.dtype} {list(packed.shape)}: want int32, 2 dims")
        inputs, outputs = packed.shape[0] * 32 // self._format.bits, packed.shape[1]
        group = inputs if self._group == -1 else self._group
        groups = -(-inputs // group)
        wanted: dict[str, tuple[int, ...]] = {
            "scales": (groups, outputs),
            "qzeros": (groups, outputs * self._format.bits // 32),
        }
        if "g_idx" in parts:
            wanted["g_idx"] = (inputs,)
        for name, shape in wanted.items():
            if parts[name].shape != shape:
                have = list(parts[name].shape)
                raise ValueError(f"{name} is {have}, not {list(shape)}, in groups of {group}")
        return Layout(self._format.name, (outputs, inputs))

    def read(self, parts: Parts) -> RawTensor:
        _, (_, inputs) = self.layout(parts)
        group = inputs if self._group == -1 else self._group
        codes = np.ascontiguousarray(parts["qweight"].T).view(np.uint8)
        zeros = self._integers(parts["qzeros"]) + np.uint8(self._below)
        zeros &= np.uint8((1 << self._format.bits) - 1)
        columns = None
        if "g_idx" in parts:
            columns = order_of_groups(parts["g_idx"], group)
        if columns is not None:
            codes = in_order(codes, self._format.bits, columns)
        scales = even_groups(parts["scales"].T, group, inputs)
        return grouped(self._format, codes, scales, even_groups(zeros.T, group, inputs), columns)

    def _integers(self, packed: NDArray[np.int32]) -> Bytes:
        flat = np.ascontiguousarray(packed).view(np.uint8)
        return nibbles(flat) if self._format is INT4 else flat.copy()


def order_of_groups(group_of: NDArray[np.int32], group: int) -> NDArray[np.int64] | None:
    """The inputs sorted by their groups; None if they are. Raises ValueError if groups have other
    sizes than `group`."""
    columns = np.argsort(group_of, kind="stable")
    if not np.array_equal(group_of[columns], np.arange(len(group_of)) // group):
        raise ValueError(f"g_idx does not have {group} inputs in each group")
    return None if np.array_equal(columns, np.arange(len(columns))) else columns


def in_order(codes: Bytes, bits: int, columns: NDArray[np.int64]) -> Bytes:
    """The columns of `codes`, of 4 bits in pairs, in another order."""
    if bits == 8:
        return codes[:, columns]
    return packed_nibbles(nibbles(codes)[:, columns])


METHOD = Gptq
