"""Finds batches that a gateway may take over: those whose owner no longer renews its lease. Pure.

A value that no longer changes shows that its writer has died. No two clocks are compared: each
gateway uses its own.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

LEASE_S = 5.0  # time without a beat after which an owner counts as dead
BEAT_S = 1.0  # between two beats of a live owner


class Standstill:
    """Remembers when each value was first seen."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Hashable, float]] = {}

    def unchanged(self, values: Mapping[str, Hashable], for_s: float, now: float) -> set[str]:
        """The names of values unchanged for `for_s` seconds. `values` must be all values; `now` is
        in seconds of a monotonic clock."""
        previous, self._seen = self._seen, {}
        for name, value in values.items():
            previous_value, since = previous.get(name, (value, now))
            self._seen[name] = value, since if previous_value == value else now
        return {name for name, (_, since) in self._seen.items() if now - since >= for_s}


class BatchLease(NamedTuple):
    """The owner of a batch ("": none), and the count of its renewals."""

    batch_id: str
    owner: str
    beat: int


class LeaseWatch:
    """Watches the leases of other gateways."""

    def __init__(self) -> None:
        self._beats = Standstill()

    def free(self, leases: Sequence[BatchLease], now: float) -> list[BatchLease]:
        """The leases without a live owner, in order. `leases` must be all leases; `now` is in
        seconds of a monotonic clock."""
        dead = self._beats.unchanged({lease.batch_id: lease for lease in leases}, LEASE_S, now)
        return [lease for lease in leases if not lease.owner or lease.batch_id in dead]
