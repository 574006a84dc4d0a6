"""Reads GPTQ weights (arXiv:2210.17323): integers packed along the inputs in 32-bit words.

`qweight` int32 [inputs / n, outputs], `qzeros` int32 [groups, outputs / n], `scales` [groups,
outputs], `g_idx` int32 [inputs] the group of each input; n integers in 32 bits, the first lowest.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.checkpoints.quantization import (
    Parts,
    QuantizationMethod,
    choice,
    group_size,
    packed_words,
    require,
)
from pdserve.engine.checkpoints.source import Layout
from pdserve.engine.weights import Bytes, RawTensor
from pdserve.engine.weights.formats import INT4, INT8, even_groups, nibbles, packed_nibbles
from pdserve.engine.weights.formats.grouped import grouped

KINDS = ("gptq", "gptq_v2")  # checkpoint_format
RULES = ("bits", "group_size")  # settings that a rule for some modules may override


class Gptq(QuantizationMethod):
    names = ("gptq",)
    forms = (("qweight", "qzeros", "scales"),)
    optional = ("g_idx",)
    adds_zero_biases = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._format = {4: INT4, 8: INT8}[choice(config, ("bits",), (4, 8))]
        self._group = group_size(config, ("group_size",), -1)
        kind = choice(config, ("checkpoint_format", "format"), KINDS, "gptq")
        self._zero_offset = 1 if kind == "gptq" else 0  # added to stored zeros to get the real ones
        for pattern, rule in (config.get("dynamic") or {}).items():
            if pattern.startswith("-:"):  # unquantized modules are stored as plain numbers
                continue
            if any(rule.get(key, config.get(key)) != config.get(key) for key in RULES):
                raise ValueError(
                    f"different settings per module are not supported (dynamic: {pattern})"
                )

    def layout(self, parts: Parts) -> Layout:
        words, outputs = packed_words(parts)
        bits = self._format.bits
        inputs = words * 32 // bits
        groups = 1 if self._group == -1 else -(-inputs // self._group)
        require(parts, "scales", np.generic, (groups, outputs))
        require(parts, "qzeros", np.int32, (groups, outputs * bits // 32))
        if "g_idx" in parts:
            require(parts, "g_idx", np.integer, (inputs,))
        return Layout(self._format.name, (outputs, inputs))

    def read(self, parts: Parts) -> RawTensor:
        _, (_, inputs) = self.layout(parts)
        group = inputs if self._group == -1 else self._group
        codes = np.ascontiguousarray(parts["qweight"].T).view(np.uint8)
        zeros = self._integers(parts["qzeros"]) + np.uint8(self._zero_offset)
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


def order_of_groups(group_of: NDArray[Any], group: int) -> NDArray[np.int64] | None:
    """Return the order that sorts a weight's inputs by their group, `group` inputs in each; None if
    they are sorted already. Raises ValueError if a group has another number of inputs."""
    columns = np.argsort(group_of, kind="stable")
    if not np.array_equal(group_of[columns], np.arange(len(group_of)) // group):
        raise ValueError(f"g_idx does not have {group} inputs in each group")
    return None if np.array_equal(columns, np.arange(len(columns))) else columns


def in_order(codes: Bytes, bits: int, columns: NDArray[np.int64]) -> Bytes:
    """Return a weight's codes with their columns (inputs) in the order `columns`; codes of 4 bits
    are packed in pairs."""
    if bits == 8:
        return codes[:, columns]
    return packed_nibbles(nibbles(codes)[:, columns])


METHOD = Gptq
