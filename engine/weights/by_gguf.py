"""Unpacking by the gguf package, for formats too rare to be worth code of our own.

The package is imported at the first use: it is slow to import, and most models need none of it.
"""

from collections.abc import Callable

from pdserve.engine.weights.bits import Bytes
from pdserve.engine.weights.format import BlockFormat, Floats


def gguf_expand(name: str) -> Callable[[Bytes], Floats]:
    """What unpacks blocks of that GGUF type name: [blocks, bytes] to [blocks, values]."""

    def expand(blocks: Bytes) -> Floats:
        import gguf

        values: Floats = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
        return values

    return expand


def gguf_format(name: str, block_values: int, block_bytes: int) -> BlockFormat:
    """The format of that GGUF type name."""
    return BlockFormat(name, block_values, block_bytes, gguf_expand(name))
