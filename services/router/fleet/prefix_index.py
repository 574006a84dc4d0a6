"""What one worker's prefix cache holds, from its events; wrong only towards knowing less.

Soft state: a gap in the sequence means lost removals, so everything known is dropped.
"""

from collections.abc import Sequence

from pdserve.protos.fleet_pb2 import PrefixEvents


class PrefixIndex:
    """The chain hashes of one worker's full blocks, at most `capacity` of them."""

    def __init__(self, capacity: int = 1 << 20) -> None:
        self._hashes: set[bytes] = set()
        self._capacity = capacity
        self._next: int | None = None
        self.gaps = 0

    def __len__(self) -> int:
        return len(self._hashes)

    def apply(self, events: PrefixEvents) -> None:
        """Take one message; sequences count hashes, so it ends at sequence + their number."""
        if events.reset:
            self._hashes.clear()
        elif self._next is not None and events.sequence != self._next:
            self._hashes.clear()
            self.gaps += 1
        self._next = events.sequence + len(events.added) + len(events.removed)
        room = self._capacity - len(self._hashes)
        self._hashes.update(events.added[:room])
        self._hashes.difference_update(events.removed)

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt are cached."""
        for index, chain in enumerate(hashes):
            if chain not in self._hashes:
                return index
        return len(hashes)
