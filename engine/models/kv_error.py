"""Estimates, before a model computes anything, how much storing its keys in 8 bits would change its
attention scores."""

from collections.abc import Callable

import numpy as np

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.layer import layer_parts
from pdserve.engine.models.parts import Attention, HeadLayerNorm, HeadNorm, Linear
from pdserve.engine.weights import Floats

INT8_STEP = 1 / (127 * 12**0.5)  # deviation of the rounding to 8 bits, over the largest value
LARGEST_ERROR = 0.05  # of a score: attention weights, its exponential, then change by 5 %


def int8_warning(config: ModelConfig, vector: Callable[[str], Floats]) -> str:
    """Return a warning about the accuracy of a model that is served with 8-bit keys; empty if none
    is needed. `vector` returns a bias by its tensor name."""
    if config.latent:
        return (
            f"{config.architecture} caches one vector per token, so its rope dims and its "
            "latent dims share one scale; the effect on accuracy has not been measured"
        )
    error = int8_score_error(config, vector)
    if error <= LARGEST_ERROR:
        return ""
    return (
        "this model's keys have large biases, and rounding them to 8 bits changes attention scores "
        f"by {error:.2g}; use float16 to avoid this"
    )


def int8_score_error(config: ModelConfig, vector: Callable[[str], Floats]) -> float:
    """Return the estimated standard deviation of the error of attention scores with 8-bit keys, in
    the worst head of the model.

    The values of a head's key share one scale, so a large bias makes the rounding steps of all of
    them coarse. A query is assumed to be its bias plus a value of size 1 in each dim. `vector`
    returns a bias by its tensor name. The result is 0 if there is nothing to estimate from: no
    biases, or norms after them.
    """
    worst = 0.0
    for n in range(config.num_layers):
        parts = layer_parts(config, n)
        attention = next(part for part in parts if isinstance(part, Attention))
        qkv = next(part for part in parts if isinstance(part, Linear))
        if not qkv.biases or any(isinstance(part, HeadNorm | HeadLayerNorm) for part in parts):
            continue
        heads = attention.heads
        q, k = (vector(bias.name).reshape(-1, heads.dim) for bias in qkv.biases[:2])
        largest = np.abs(k).max(1)
        length = np.sqrt((q**2).sum(1) + heads.dim).reshape(heads.kv, -1).max(1)
        worst = max(worst, float((length * largest).max() * INT8_STEP * attention.scale))
    return worst
