"""Reads the experts of gpt-oss: 4-bit floats with one exponent per 32 values (OCP MX).

`x_blocks` uint8 [experts, outputs, groups, 16] (or the last two dims as one) holds two values a
byte, the first in the low nibble; `x_scales` uint8 [experts, outputs, groups] holds the exponents.
`x` is the name of a projection of all experts of a layer.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from pdserve.engine.checkpoints.quantization import Parts, QuantizationMethod, require
from pdserve.engine.checkpoints.source import Layout
from pdserve.engine.weights import RawTensor
from pdserve.engine.weights.formats.fp4 import MXFP4, mxfp4

STORED = ("blocks", "scales")


class Mxfp4Experts(QuantizationMethod):
    names = ("mxfp4",)
    forms = (STORED,)

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Ignore the config: modules that it exempts from quantization store no blocks, so `find`
        skips them."""

    def layout(self, parts: Parts) -> Layout:
        blocks, scales = parts["blocks"], parts["scales"]
        if scales.ndim != 3 or scales.dtype != np.uint8 or 0 in scales.shape:
            raise ValueError(
                f"scales are {scales.dtype} {list(scales.shape)}: expected uint8, 3 dims"
            )
        experts, outputs, groups = scales.shape
        shape = (groups, 16) if blocks.ndim == 4 else (groups * 16,)
        require(parts, "blocks", np.uint8, (experts, outputs, *shape))
        return Layout(MXFP4.name, (experts, outputs, groups * 32))

    def read(self, parts: Parts) -> RawTensor:
        experts, outputs, _ = self.layout(parts).shape
        return mxfp4(parts["blocks"].reshape(experts, outputs, -1), parts["scales"])

    def find(self, stored: Collection[str]) -> dict[str, dict[str, str]]:
        weights: dict[str, dict[str, str]] = {}
        for name in stored:
            stem = name.removesuffix("_blocks")
            parts = {part: f"{stem}_{part}" for part in STORED}
            if stem != name and parts["scales"] in stored:
                weights[f"{stem}.weight"] = parts
        return weights


METHOD = Mxfp4Experts
