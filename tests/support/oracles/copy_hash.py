"""The tag of kernels/cuda/copy_hash.h, computed as its comment defines it."""

import numpy as np

from pdserve.kernels.copy_hash import PRIME


def tag_of(data: bytes, key: bytes) -> tuple[int, int]:
    """Return a number for each lane, from a payload of whole units and 32 bytes of key."""
    words = [int(word) for word in np.frombuffer(data, "<u4")]
    tags = []
    for at in (0, 16):
        r, pad = (int.from_bytes(key[i : i + 8], "little") % PRIME for i in (at, at + 8))
        total = 0
        for word in reversed(words):
            total = (total * r + word) % PRIME
        tags.append((pad + len(data) * r + total * r * r) % PRIME)
    return tags[0], tags[1]
