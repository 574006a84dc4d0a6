"""Embeddings in the clients' formats, and their similarity. Pure."""

import math
from array import array
from base64 import b64encode
from collections.abc import Sequence
from operator import mul
from struct import pack


def shaped(values: Sequence[float], dimensions: int | None, normalizes: bool) -> "array[float]":
    """Return the first `dimensions` numbers (None: all) as float32, of length 1 if `normalizes`."""
    selected = values[:dimensions]
    length = math.hypot(*selected) if normalizes else 1.0
    return array("f", [value / length for value in selected] if length else selected)


def base64_of(vector: Sequence[float]) -> str:
    """Return the vector's numbers as little-endian float32, in base64."""
    return b64encode(pack(f"<{len(vector)}f", *vector)).decode()


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine similarity, from -1 to 1; 0 if one vector is all zeros."""
    lengths = math.hypot(*a) * math.hypot(*b)
    return sum(map(mul, a, b)) / lengths if lengths else 0.0
