"""The short name of a model's dominant weight format."""

import math
from collections import Counter
from collections.abc import Iterable

from pdserve.engine.checkpoints.source import Layout
from pdserve.engine.weights.plain import PLAIN

LABELS = {"F32": "float32", "F16": "float16", "BF16": "bf16", "F64": "float64"}


def quantization_label(layouts: Iterable[Layout]) -> str:
    """Return the format of most matrix weights, by number of values, e.g. "Q4_1", "bf16"."""
    assert LABELS.keys() == PLAIN.keys()
    values: Counter[str] = Counter()
    for stored in layouts:
        if len(stored.shape) > 1:
            values[stored.format] += math.prod(stored.shape)
    dominant = values.most_common(1)[0][0]
    return LABELS.get(dominant, dominant)
