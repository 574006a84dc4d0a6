"""Sets of tokens as bits: token `id` is bit id % 32 of word id // 32, as in llguidance. Pure."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def no_tokens(vocab_size: int) -> Words:
    """The empty set."""
    return np.zeros((vocab_size + 31) // 32, dtype=np.uint32)


def tokens_of(ids: Iterable[int], vocab_size: int) -> Words:
    """The set of these ids."""
    words = no_tokens(vocab_size)
    for token in ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def all_but(ids: Iterable[int], vocab_size: int) -> Words:
    """The set of all other ids."""
    return np.invert(tokens_of(ids, vocab_size))
