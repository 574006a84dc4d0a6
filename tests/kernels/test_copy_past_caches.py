"""The copy of a hand-off copies every byte at any alignment of source and target, and none
beyond."""

import random

import numpy as np
import pytest

from pdserve.kernels._native import copy_past_caches

ROOM = 1000


def test_any_offset_and_length() -> None:
    rng = random.Random(1)
    source = np.frombuffer(rng.randbytes(ROOM), np.uint8)
    lengths = {0, 1, 63, 64, 65, *(rng.randrange(ROOM // 2) for _ in range(500))}
    for length in sorted(lengths):
        start, at = rng.randrange(ROOM - length), rng.randrange(ROOM - length)
        target = np.full(ROOM, 255, np.uint8)
        expected = target.copy()
        expected[at : at + length] = source[start : start + length]
        copy_past_caches(target[at : at + length], source[start : start + length])
        assert (target == expected).all(), (length, start, at)


def test_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in size"):
        copy_past_caches(np.zeros(4, np.uint8), np.zeros(5, np.uint8))
