"""Which running requests go to another decode worker, in which order; pure."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Running:
    """A request that can move."""

    ordinal: int  # of arrival; unique
    num_tokens: int  # whose KV would move
    left: int | None  # tokens that it may still generate; None: as many as fit


def drain_order(running: Iterable[Running]) -> list[Running]:
    """The most urgent first: what may run longest is least likely to end in time by itself."""
    return sorted(running, key=lambda r: (r.left is not None, -(r.left or 0), r.ordinal))
