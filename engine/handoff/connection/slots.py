"""Tracks the owner of each slot of a connection; pure.

    free -- take --> filling -- sent --> in flight == frame ==> lent -- credit --> (Credit) --> free
                        '-- put back --> free

Prefill owns a slot until its frame is sent, then decode until it credits the slot, once. An answer
to the frame implies the same, before or after the credit. A resent frame takes a slot like any
other frame, so never one that decode still has. A credit names its frame by a mark: if the network
doubles a record, the second credit may arrive when the slot already has another frame.
"""

from collections import deque

from pdserve.engine.handoff.protocol import FrameError


class WriterSlots:
    """The slots at prefill. Not thread-safe: the link's lock guards it."""

    def __init__(self, count: int) -> None:
        self._free = deque(range(count))
        self._filling: set[int] = set()
        self._in_flight: dict[int, bytes] = {}  # the frame's mark

    @property
    def num_free(self) -> int:
        return len(self._free)

    def open(self, count: int) -> None:
        """Make the slots available. Raises FrameError if they were available before."""
        if self._free or self._filling or self._in_flight:
            raise FrameError("decode announced a second window")
        self._free.extend(range(count))

    def take(self) -> int:
        slot = self._free.popleft()
        self._filling.add(slot)
        return slot

    def put_back(self, slot: int) -> None:
        """Free the slot: nothing was sent in it."""
        self._filling.remove(slot)
        self._free.appendleft(slot)

    def sent(self, slot: int, mark: bytes = b"") -> None:
        self._filling.remove(slot)
        self._in_flight[slot] = mark

    def expects(self, slot: int, mark: bytes) -> bool:
        """Return whether the slot is in flight with that frame."""
        return self._in_flight.get(slot) == mark

    def credited(self, slot: int) -> None:
        """Free the slot. Raises FrameError if it is not in flight."""
        if slot not in self._in_flight:
            raise FrameError("a credit names a slot that is not in flight")
        del self._in_flight[slot]
        self._free.append(slot)


class ReaderSlots:
    """The slots at decode. One thread lends, any thread credits."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lent: dict[int, bytes] = {}  # the frame's mark

    def check(self, slot: int) -> bool:
        """Return whether the slot is lent. Raises FrameError if there is no such slot."""
        if slot >= self._count:
            raise FrameError("the slot number is out of range")
        return slot in self._lent

    def lend(self, slot: int, mark: bytes = b"") -> None:
        """Lend the slot to a frame that has arrived. Raises FrameError if it is lent already."""
        if self.check(slot):
            raise FrameError("the slot was used again without a credit")
        self._lent[slot] = mark

    def credit(self, slot: int) -> bytes:
        """End a loan and return its frame's mark. Raises KeyError if the slot is not lent."""
        return self._lent.pop(slot)
