"""GGUF's formats whose levels come from codebooks or non-linear tables (IQ), and its ternary
formats (TQ).

Levels of IQ2 and IQ3 are codebook entries with a sign. Levels of IQ1 are multiples of an eighth,
because a group is shifted up or down by an eighth. Levels of TQ are -1, 0 and 1. Kernels read
neither codebooks nor packed ternary levels, so they get 8-bit integers (LevelFormat.packable).
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.weights.format import (
    BLOCKS,
    CHUNK_VALUES,
    BlockFormat,
    Bytes,
    Floats,
    RawTensor,
    gguf_expand,
    gguf_format,
    half,
    row_runs,
)
from pdserve.engine.weights.formats.grouped import CODES, INT8, SCALES, nibbles


@dataclass(frozen=True)
class LevelFormat(BlockFormat):
    """A block format whose blocks are divided into groups with one scale each. A value is the scale
    of its group times an integer n from -127 to 127."""

    scales: Callable[[Bytes], Floats]  # uint8 [blocks, block_bytes] -> float32 [blocks, groups]

    def packable(self, raw: RawTensor) -> RawTensor:
        """Convert a weight to INT8 with the same values: CODES uint8 [rows, columns], each n + 128,
        and SCALES float32 [rows, groups of a row]."""
        blocks = raw.parts[BLOCKS].reshape(-1, self.block_bytes)
        scales: Floats = np.empty((len(blocks), self.scales(blocks[:1]).shape[1]), np.float32)
        codes: Bytes = np.empty((len(blocks), self.block_values), np.uint8)

        def convert(run: slice) -> None:
            with np.errstate(all="ignore"):  # infinite values from a file's scales are not an error
                scales[run] = self.scales(blocks[run])
                codes[run] = self._codes(blocks[run], scales[run])

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(convert, row_runs(codes.shape, CHUNK_VALUES)))
        rows = raw.shape[0]
        parts: dict[str, NDArray[Any]] = {
            CODES: codes.reshape(rows, -1),
            SCALES: scales.reshape(rows, -1),
        }
        return RawTensor(parts, INT8.name, raw.shape, raw.columns)

    def _codes(self, blocks: Bytes, scales: Floats) -> Bytes:
        levels = self.expand(blocks).reshape(*scales.shape, -1)
        levels /= scales[..., None]
        levels[~np.isfinite(levels)] = 0  # the scale is 0 or not finite
        codes: Bytes = (np.rint(levels) + 128).astype(np.uint8)
        return codes.reshape(len(blocks), -1)


def level_format(
    name: str, block_values: int, block_bytes: int, scales: Callable[[Bytes], Floats]
) -> LevelFormat:
    """Return the LevelFormat of a GGUF type; `scales` computes the scales of the groups in its
    blocks."""
    return LevelFormat(name, block_values, block_bytes, gguf_expand(name), scales)


def words(stored: Bytes, size: type[np.unsignedinteger]) -> NDArray[Any]:
    """Interpret bytes as little-endian integers of type `size`: [blocks, bytes] to [blocks, n]."""
    return np.ascontiguousarray(stored).view(size)


EIGHTH = np.float32(0.125)


def _iq1_s(blocks: Bytes) -> Floats:
    factors = words(blocks[:, 34:50], np.uint16) >> 12 & 7
    return half(blocks, 0) * (2 * factors + 1).astype(np.float32) * EIGHTH


def _iq1_m(blocks: Bytes) -> Floats:
    """Return the group scales of IQ1_M blocks, float32 [blocks, groups]. Each block has four words
    with three bits per group; the upper bits of these words hold the scale of the block."""
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
    level_format("TQ1_0", 256, 54, lambda blocks: half(blocks, 52)),
    level_format("TQ2_0", 256, 66, lambda blocks: half(blocks, 64)),
)
