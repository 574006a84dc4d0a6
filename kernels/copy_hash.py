"""Keys of the hashing copy (kernels/cuda/copy_hash.h), which copies a payload and computes its tag.
A key has two lanes of two numbers (r, s); the kernel also needs powers of r.

Use a key for one payload only. The GPU and the host build compute with the same numbers.
"""

import numpy as np
from numpy.typing import NDArray

PRIME = (1 << 61) - 1
KEY_BYTES = 32  # r and s of both lanes
TAG_BYTES = 16  # one number below PRIME per lane, little-endian
UNIT_BYTES = 16  # payloads and blocks are multiples of this
TILE_BYTES = 64 << 10  # copied by one thread block
LANE_WORDS = 7
_THREADS = 256
_TILE_UNITS = TILE_BYTES // UNIT_BYTES


def expand_key(key: bytes) -> NDArray[np.uint64]:
    """Return the words that the kernel reads for a key: struct Lane of both lanes, uint64 [2 *
    LANE_WORDS]. Raises ValueError unless the key has KEY_BYTES bytes."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"the key of a hashing copy has {KEY_BYTES} bytes, not {len(key)}")
    words = []
    for offset in (0, KEY_BYTES // 2):
        r, pad = (int.from_bytes(key[i : i + 8], "little") % PRIME for i in (offset, offset + 8))
        powers = [r, r * r % PRIME, pow(r, 3, PRIME), pow(r, 4, PRIME)]
        words += [*powers, pow(r, 4 * _THREADS, PRIME), pow(r, 4 * _TILE_UNITS, PRIME), pad]
    return np.array(words, dtype=np.uint64)
