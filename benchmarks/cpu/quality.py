"""Agreement with float32 and perplexity, as pure functions of teacher-forced scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Top = Sequence[tuple[int, float]]  # ids and log-probabilities, best first


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A position whose best id is not float32's."""

    position: int
    expected: int
    got: int
    gap: float  # between the two in float32, in log-probability
    at_least: bool  # `got` is not among float32's candidates: the gap is that to the last candidate


def mismatches(reference: Sequence[Top], argmax: Sequence[int]) -> list[Mismatch]:
    """Mismatches in order. Raises ValueError if the numbers of positions differ."""
    if len(reference) != len(argmax):
        raise ValueError(f"{len(reference)} positions of the reference, {len(argmax)} others")
    found = []
    for position, (top, got) in enumerate(zip(reference, argmax, strict=True)):
        best, highest = top[0]
        if got == best:
            continue
        known = dict(top)
        gap = highest - known.get(got, top[-1][1])
        found.append(Mismatch(position, best, got, round(gap, 6), got not in known))
    return found


def perplexity(nll: Sequence[float]) -> float:
    """Perplexity from the mean over all positions; not finite if a score is not."""
    return math.exp(math.fsum(nll) / len(nll)) if all(map(math.isfinite, nll)) else math.nan


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The scores of several windows as one."""
    return {key: [one for part in parts for one in part[key]] for key in parts[0]}


def windows(ids: Sequence[int], length: int, first: Sequence[int] = ()) -> list[list[int]]:
    """Whole windows of `length` ids, each starting with `first` (a bos id, or nothing)."""
    step = length - len(first)
    return [[*first, *ids[at : at + step]] for at in range(0, len(ids) - step + 1, step)]
