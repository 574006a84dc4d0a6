"""Which batches a gateway may take over: those whose owner's beat stands still. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from pdserve.gateway.batches.standstill import Standstill

LEASE_S = 5.0  # without a beat, after which an owner counts as dead
BEAT_S = 1.0  # between two beats of a live owner


class BatchLease(NamedTuple):
    """Who runs a batch ("": nobody), and how often it has said so."""

    batch_id: str
    owner: str
    beat: int


class LeaseWatch:
    """Watches the leases of other gateways."""

    def __init__(self) -> None:
        self._beats = Standstill()

    def free(self, leases: Sequence[BatchLease], now: float) -> list[BatchLease]:
        """Of all leases that there are those which nobody holds, in their order; `now` in seconds
        of a clock that never goes back."""
        dead = self._beats.unchanged({lease.batch_id: lease for lease in leases}, LEASE_S, now)
        return [lease for lease in leases if not lease.owner or lease.batch_id in dead]
