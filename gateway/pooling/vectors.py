"""Embeddings as clients get them, and how alike two are. Pure."""

import math
from array import array
from base64 import b64encode
from collections.abc import Sequence
from operator import mul
from struct import pack


def shaped(values: Sequence[float], dimensions: int | None, normalizes: bool) -> "array[float]":
    """The first `dimensions` numbers (None: all), of length 1 if that is wanted; float32."""
    kept = values[:dimensions]
    length = math.hypot(*kept) if normalizes else 1.0
    return array("f", [value / length for value in kept] if length else kept)


def base64_of(vector: Sequence[float]) -> str:
    """Its numbers as little-endian float32."""
    return b64encode(pack(f"<{len(vector)}f", *vector)).decode()


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """From -1 to 1; 0 if one of them is all zeros."""
    lengths = math.hypot(*a) * math.hypot(*b)
    return sum(map(mul, a, b)) / lengths if lengths else 0.0
