"""Tracks which side owns each payload slot of a data connection; pure.

    free -- take --> filling -- sent --> in flight == frame ==> lent -- credit --> (Credit) --> free
                        '-- put back --> free

Prefill owns a slot until its frame is sent; then decode owns it until decode credits the slot,
once. An answer to the frame also frees the slot, whether it arrives before or after the credit. A
resent frame takes a free slot like any other frame, so never one that decode still owns. A credit
names its frame by a mark: if the network delivers a credit twice, the second one may arrive when
the slot already has another frame.
"""

from collections import deque

from pdserve.engine.handoff.protocol import FrameError


class WriterSlots:
    """The slots of a connection as prefill sees them: free, being filled, or in flight. Not
    thread-safe: the DataLink's lock guards it."""

    def __init__(self, count: int) -> None:
        self._free = deque(range(count))
        self._filling: set[int] = set()
        self._in_flight: dict[int, bytes] = {}  # the frame's mark

    @property
    def num_free(self) -> int:
        return len(self._free)

    def open(self, count: int) -> None:
        """Make `count` slots available. Raises FrameError if slots were available before."""
        if self._free or self._filling or self._in_flight:
            raise FrameError("decode announced a second window of slots for one connection")
        self._free.extend(range(count))

    def take(self) -> int:
        slot = self._free.popleft()
        self._filling.add(slot)
        return slot

    def put_back(self, slot: int) -> None:
        """Free a slot that was taken but in which no frame was sent."""
        self._filling.remove(slot)
        self._free.appendleft(slot)

    def sent(self, slot: int, mark: bytes = b"") -> None:
        self._filling.remove(slot)
        self._in_flight[slot] = mark

    def expects(self, slot: int, mark: bytes) -> bool:
        """Return whether the frame with this mark is in flight in the slot."""
        return self._in_flight.get(slot) == mark

    def credited(self, slot: int) -> None:
        """Free the slot of a frame that decode has credited. Raises FrameError if no frame is in
        flight in it."""
        if slot not in self._in_flight:
            raise FrameError("decode credited a slot that is not in flight")
        del self._in_flight[slot]
        self._free.append(slot)


class ReaderSlots:
    """The slots of a connection as decode sees them: a slot is lent to a frame from its arrival to
    its credit. One thread lends slots, any thread credits them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lent: dict[int, bytes] = {}  # the frame's mark

    def check(self, slot: int) -> bool:
        """Return whether the slot holds a frame that is not credited yet. Raises FrameError for a
        slot number out of range."""
        if slot >= self._count:
            raise FrameError("prefill named a slot number that is out of range")
        return slot in self._lent

    def lend(self, slot: int, mark: bytes = b"") -> None:
        """Assign the slot to a frame that has arrived. Raises FrameError if it holds another
        frame."""
        if self.check(slot):
            raise FrameError("prefill used a slot again without a credit")
        self._lent[slot] = mark

    def credit(self, slot: int) -> bytes:
        """Take the slot from its frame and return the frame's mark. Raises KeyError if it holds no
        frame."""
        return self._lent.pop(slot)
