"""Block formats whose values are 8-bit integers times a scale for each group of a block, and
formats that the gguf package unpacks.

The gguf package is imported at its first use: it is slow to import, and most models do not need it.

Kernels read neither codebooks nor packed ternary levels, so they get the integers.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.weights.bits import Bytes
from pdserve.engine.weights.format import (
    BLOCKS,
    CHUNK_VALUES,
    BlockFormat,
    Floats,
    RawTensor,
    row_runs,
)
from pdserve.engine.weights.formats import CODES, INT8, SCALES


def gguf_expand(name: str) -> Callable[[Bytes], Floats]:
    """Return a function that unpacks blocks of a GGUF type: [blocks, bytes] to [blocks, values]."""

    def expand(blocks: Bytes) -> Floats:
        import gguf

        values: Floats = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
        return values

    return expand


def gguf_format(name: str, block_values: int, block_bytes: int) -> BlockFormat:
    """Return the format of a GGUF type."""
    return BlockFormat(name, block_values, block_bytes, gguf_expand(name))


@dataclass(frozen=True)
class LevelFormat(BlockFormat):
    """A block format with `groups` groups of block_values / groups values. A value is n times the
    scale of its group, with an integer n from -127 to 127."""

    scales: Callable[[Bytes], Floats]  # uint8 [blocks, block_bytes] -> float32 [blocks, groups]

    def packable(self, raw: RawTensor) -> RawTensor:
        """Return the same values as INT8: CODES uint8 [rows, columns], each n + 128, and SCALES
        float32 [rows, columns / (block_values / groups)]."""
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
    """Return the format of a GGUF type."""
    return LevelFormat(name, block_values, block_bytes, gguf_expand(name), scales)


def words(stored: Bytes, size: type[np.unsignedinteger]) -> NDArray[Any]:
    """Interpret bytes as little-endian integers of type `size`: [blocks, bytes] to [blocks, n]."""
    return np.ascontiguousarray(stored).view(size)
