"""Reads AWQ weights (arXiv:2306.00978) as AutoAWQ writes them: 4-bit integers packed along the
outputs.

`qweight` int32 [inputs, outputs / 8], `qzeros` int32 [groups, outputs / 8], `scales` [groups,
outputs]. The eight integers of a word, lowest bits first, belong to the outputs in ORDER.
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
from pdserve.engine.weights.formats import INT4, even_groups, nibbles, packed_nibbles
from pdserve.engine.weights.formats.grouped import grouped

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Awq(QuantizationMethod):
    names = ("awq",)
    forms = (("qweight", "qzeros", "scales"),)

    def __init__(self, config: Mapping[str, Any]) -> None:
        choice(config, ("bits", "w_bit"), (4,))
        choice({"version": str(config.get("version") or "gemm").lower()}, ("version",), ("gemm",))
        self._group = group_size(config, ("group_size", "q_group_size"), 128)

    def layout(self, parts: Parts) -> Layout:
        inputs, words = packed_words(parts)
        if inputs % 2:
            raise ValueError(f"qweight has {inputs} inputs: expected an even number")
        groups = 1 if self._group == -1 else -(-inputs // self._group)
        require(parts, "scales", np.generic, (groups, words * 8))
        require(parts, "qzeros", np.int32, (groups, words))
        return Layout(INT4.name, (words * 8, inputs))

    def read(self, parts: Parts) -> RawTensor:
        _, (_, inputs) = self.layout(parts)
        group = inputs if self._group == -1 else self._group
        codes = packed_nibbles(np.ascontiguousarray(_integers(parts["qweight"]).T))
        zeros = even_groups(_integers(parts["qzeros"]).T, group, inputs)
        return grouped(INT4, codes, even_groups(parts["scales"].T, group, inputs), zeros)


def _integers(packed: NDArray[np.int32]) -> Bytes:
    """Unpack the 4-bit integers of int32 [n, words] to uint8 [n, 8 * words], in the order of the
    outputs."""
    words = nibbles(np.ascontiguousarray(packed).view(np.uint8)).reshape(*packed.shape, 8)
    return words[..., np.argsort(ORDER)].reshape(len(packed), -1)


METHOD = Awq
