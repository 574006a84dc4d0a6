"""Values at the bounds of a sampling parameter, and just outside them."""

import math
from dataclasses import fields

from pdserve.engine.api import Range, SamplingParams

_WHOLE = {
    "seed", *(f.name for f in fields(SamplingParams) if f.type in (int, int | None, "int"))
}  # fmt: skip


def _step(name: str, bound: float) -> float:
    """Return a step large enough to remain in a float32, the type in the message."""
    return 1 if name in _WHOLE else max(abs(bound), 1e-3) * 1e-3


def inside(name: str, allowed: Range) -> list[float]:
    low = allowed.low + (_step(name, allowed.low) if allowed.open_low else 0)
    return [low] if allowed.high == math.inf else [low, allowed.high]


def outside(name: str, allowed: Range) -> list[float]:
    low = allowed.low if allowed.open_low else allowed.low - _step(name, allowed.low)
    high = allowed.high + _step(name, allowed.high)
    return [low] if allowed.high == math.inf else [low, high]
