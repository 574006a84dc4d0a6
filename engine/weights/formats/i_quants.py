"""Formats whose levels come from codebooks or non-linear tables (IQ).

Levels of IQ2 and IQ3 are codebook entries with a sign. Levels of IQ1 are multiples of an eighth,
because a group is shifted up or down by an eighth.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.weights.bits import Bytes, half
from pdserve.engine.weights.format import Floats
from pdserve.engine.weights.formats.grouped import nibbles
from pdserve.engine.weights.levels import gguf_format, level_format, words

EIGHTH = np.float32(0.125)


def _iq1_s(blocks: Bytes) -> Floats:
    factors = words(blocks[:, 34:50], np.uint16) >> 12 & 7
    return half(blocks, 0) * (2 * factors + 1).astype(np.float32) * EIGHTH


def _iq1_m(blocks: Bytes) -> Floats:
    """Scales: three bits per group in four words, whose upper bits hold the block's scale."""
    stored = words(blocks[:, 48:56], np.uint16)
    upper = stored >> 12
    scale_bits = upper[:, 0] | upper[:, 1] << 4 | upper[:, 2] << 8 | upper[:, 3] << 12
    factors = stored[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7
    d = scale_bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return d[:, None] * (2 * factors.reshape(len(blocks), -1) + 1).astype(np.float32) * EIGHTH


def _iq2(blocks: Bytes, factors: NDArray[Any]) -> Floats:
    return half(blocks, 0) * (np.float32(0.5) + factors.astype(np.float32)) * np.float32(0.25)


def _iq2_xxs(blocks: Bytes) -> Floats:
    return _iq2(blocks, words(blocks[:, 2:66], np.uint32)[:, 1::2] >> 28)


def _iq2_xs(blocks: Bytes) -> Floats:
    return _iq2(blocks, nibbles(blocks[:, 66:74]))


def _iq2_s(blocks: Bytes) -> Floats:
    return _iq2(blocks, nibbles(blocks[:, 74:82]))


def _iq3_xxs(blocks: Bytes) -> Floats:
    factors = (words(blocks[:, 66:98], np.uint32) >> 28).astype(np.float32)
    return half(blocks, 0) * (np.float32(0.5) + factors) * np.float32(0.5)


def _iq3_s(blocks: Bytes) -> Floats:
    return half(blocks, 0) * (1 + 2 * nibbles(blocks[:, 106:110])).astype(np.float32)


FORMATS = (
    level_format("IQ1_S", 256, 50, _iq1_s),
    level_format("IQ1_M", 256, 56, _iq1_m),
    level_format("IQ2_XXS", 256, 66, _iq2_xxs),
    level_format("IQ2_XS", 256, 74, _iq2_xs),
    level_format("IQ2_S", 256, 82, _iq2_s),
    level_format("IQ3_XXS", 256, 98, _iq3_xxs),
    level_format("IQ3_S", 256, 110, _iq3_s),
    gguf_format("IQ4_NL", 32, 18),
    gguf_format("IQ4_XS", 256, 136),
)
