"""Which batches of others a gateway may take over: those whose owner's beat stands still. Pure.

No two clocks are compared: each gateway watches the beats with its own.
"""

from collections.abc import Iterable
from typing import NamedTuple

LEASE_S = 5.0  # without a beat, after which an owner counts as dead
BEAT_S = 1.0  # between two beats of a live owner


class BatchLease(NamedTuple):
    """Who runs a batch ("": nobody), and how often it has said so."""

    batch_id: str
    owner: str
    beat: int


class LeaseWatch:
    """Remembers when each beat was first seen."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[BatchLease, float]] = {}

    def free(self, leases: Iterable[BatchLease], now: float) -> list[BatchLease]:
        """Of all leases that there are those which nobody holds, in their order; `now` in seconds
        of a clock that never goes back."""
        before, self._seen = self._seen, {}
        found = []
        for lease in leases:
            known, since = before.get(lease.batch_id, (lease, now))
            if known != lease:
                since = now
            self._seen[lease.batch_id] = lease, since
            if not lease.owner or now - since >= LEASE_S:
                found.append(lease)
        return found
