"""A weight format and its quantization method, added from outside the product.

Its files hold eight-bit levels with a scale and a zero for each group of values. Importing this
file registers both.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pdserve.engine.checkpoints import quantization
from pdserve.engine.checkpoints.source import Layout
from pdserve.engine.weights import Floats, RawTensor, formats
from pdserve.engine.weights.format import Format

GROUP = 16


class Grouped8(Format):
    name = "GROUPED8"

    def unpack(self, raw: RawTensor) -> Floats:
        levels, scales, zeros = (raw.parts[part] for part in ("qweight", "scales", "qzeros"))
        grouped = levels.reshape(*scales.shape, GROUP).astype(np.float32)
        centred = grouped - zeros[..., None].astype(np.float32)
        return (centred * scales[..., None].astype(np.float32)).reshape(levels.shape)


class Method(quantization.QuantizationMethod):
    names = ("grouped",)
    forms = (("qweight", "scales", "qzeros"),)

    def __init__(self, config: Mapping[str, Any]) -> None:
        quantization.choice(config, ("group_size",), (GROUP,))

    def layout(self, parts: quantization.Parts) -> Layout:
        levels = parts["qweight"]
        rows, cols = levels.shape
        if cols % GROUP or any(
            parts[p].shape != (rows, cols // GROUP) for p in ("scales", "qzeros")
        ):
            raise ValueError(f"scales or zeros do not fit levels of shape {[rows, cols]}")
        return Layout(Grouped8.name, (rows, cols))

    def read(self, parts: quantization.Parts) -> RawTensor:
        return RawTensor(parts, *self.layout(parts))


formats.register(Grouped8())
quantization.register(Method)


def quantized(values: Floats) -> dict[str, Any]:
    """Return the parts that hold nearly these values."""
    groups = values.reshape(len(values), -1, GROUP)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scales = ((high - low) / 255).astype(np.float16)
    zeros = np.clip(np.round(-low / scales.astype(np.float32)), 0, 255).astype(np.uint8)
    levels = np.round(groups / scales[..., None].astype(np.float32)) + zeros[..., None]
    return {
        "qweight": np.clip(levels, 0, 255).astype(np.uint8).reshape(values.shape),
        "scales": scales,
        "qzeros": zeros,
    }
