"""Unpacking with the gguf package, for rare formats.

The package is imported at its first use: it is slow to import, and most models do not need it.
"""

from collections.abc import Callable

from pdserve.engine.weights.bits import Bytes
from pdserve.engine.weights.format import BlockFormat, Floats


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
