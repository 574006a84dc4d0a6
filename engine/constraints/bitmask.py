"""Sets of tokens as bits: token `id` is bit id % 32 of word id // 32, as in llguidance. Pure."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Bitmask = NDArray[np.uint32]


def bitmask_of(ids: Iterable[int], vocab_size: int) -> Bitmask:
    """Return the set of these ids."""
    bitmask = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
    for token in ids:
        bitmask[token // 32] |= np.uint32(1 << token % 32)
    return bitmask


def all_but(ids: Iterable[int], vocab_size: int) -> Bitmask:
    """Return the set of all other ids."""
    return np.invert(bitmask_of(ids, vocab_size))
