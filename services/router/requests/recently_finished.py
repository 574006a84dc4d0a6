"""Placements of requests that have just ended, because their gateway may not know the outcome.
Pure.

A broken session loses the messages in flight, perhaps even `Placed`. Decode keeps the last events
of an ended attempt for a while (KEPT of services/decode/lease_machine.py): a request that is issued
again needs only its placement to receive them, and nothing is computed twice.
"""

from collections import OrderedDict

from pdserve.protos import common_pb2 as pb

KEEP_S = 5.0  # as long as decode keeps them

Key = tuple[bytes, str]  # client, request


class RecentlyFinished:
    """Placements of ended requests, for KEEP_S seconds."""

    def __init__(self) -> None:
        # Oldest first: epoch, placement, time of the end.
        self._ended: OrderedDict[Key, tuple[int, pb.Placement, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, key: Key, epoch: int, placement: pb.Placement, now: float) -> None:
        """Remember where a request ended."""
        self._ended[key] = (epoch, placement, now)
        self._ended.move_to_end(key)

    def restore(self, key: Key, start: pb.Start) -> None:
        """Add the placement to a Start that was issued again without it."""
        ended = self._ended.get(key)
        if ended is not None and ended[0] < start.epoch and not start.HasField("placement"):
            start.placement.CopyFrom(ended[1])

    def tick(self, now: float) -> None:
        """Forget placements older than KEEP_S."""
        while self._ended and now - next(iter(self._ended.values()))[2] >= KEEP_S:
            self._ended.popitem(last=False)
