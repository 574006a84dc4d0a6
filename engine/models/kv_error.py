"""Whether a model bears keys of 8 bits, as far as its biases tell."""

from collections.abc import Callable

import numpy as np

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.layer import layer_parts
from pdserve.engine.models.parts import Attention, HeadNorm, Linear
from pdserve.engine.weights.format import Floats

INT8_STEP = 1 / (127 * 12**0.5)  # deviation of what rounding to 8 bits changes, of the largest
BORNE = 0.05  # of a score: weights, its e-th powers, then change by a twentieth


def int8_score_error(config: ModelConfig, vector: Callable[[str], Floats]) -> float:
    """The deviation of attention scores that keys of 8 bits cause, in the worst head.

    A key shares one scale over its head, so a large bias makes all its steps coarse. A query is
    taken as its bias with a value of size 1 on top in each dim. `vector` gives biases by name. 0 if
    nothing is known: no bias, or a norm behind it.
    """
    worst = 0.0
    for n in range(config.num_layers):
        parts = layer_parts(config, n)
        attention = next(part for part in parts if isinstance(part, Attention))
        first = next(part for part in parts if isinstance(part, Linear))
        if not first.biases or any(isinstance(part, HeadNorm) for part in parts):
            continue
        heads = attention.heads
        q, k = (vector(bias.name).reshape(-1, heads.dim) for bias in first.biases[:2])
        most = np.abs(k).max(1)
        length = np.sqrt((q**2).sum(1) + heads.dim).reshape(heads.kv, -1).max(1)
        worst = max(worst, float((length * most).max() * INT8_STEP * attention.scale))
    return worst
