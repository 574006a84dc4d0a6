"""Finds batches that a gateway may take over: those whose owner no longer renews its lease.
Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from pdserve.gateway.batches.standstill import Standstill

LEASE_S = 5.0  # time without a beat after which an owner counts as dead
BEAT_S = 1.0  # between two beats of a live owner


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
