"""SentencePiece's tables of replaced characters (`precompiled_charsmap`)."""

import struct
from collections.abc import Mapping

BLOCK = 256  # children of a node, one for each byte


def charsmap(replaced: Mapping[str, str]) -> bytes:
    """Return the table that replaces each text by another: a trie in Darts-clone's layout, in which
    each node has a block for its children, and the replacements."""
    units, texts = [0] * BLOCK, b""
    units[0] = BLOCK << 10  # the root, whose children are in the second block
    blocks = {b"": BLOCK}  # prefix -> begin of its children
    units += [0] * BLOCK
    for source, target in replaced.items():
        key, place = source.encode(), 0
        for n in range(1, len(key) + 1):
            place = blocks[key[: n - 1]] + key[n - 1]
            if key[:n] not in blocks:
                blocks[key[:n]] = len(units)
                units[place] = (place ^ len(units)) << 10 | key[n - 1]
                units += [0] * BLOCK
        units[place] |= 1 << 8  # it has a leaf
        units[blocks[key]] = 1 << 31 | len(texts)
        texts += target.encode() + b"\0"
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts
