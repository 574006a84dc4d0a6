"""Who owns each slot of a connection; pure.

    free -- take --> filling -- sent --> in flight == frame ==> lent -- credit --> (Credit) --> free
                        '-- put back --> free

Prefill owns a slot until its frame is sent, then decode until it credits it, once. A frame that is
sent again takes a slot like any other, so never the one that decode still has.
"""

from collections import deque

from pdserve.engine.handoff.frames import FrameError


class WriterSlots:
    """prefill's side. Not thread-safe: the link's lock guards it."""

    def __init__(self, count: int) -> None:
        self._free = deque(range(count))
        self._filling: set[int] = set()
        self._in_flight: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def open(self, count: int) -> None:
        """There are slots from now on. Raises FrameError if there were before."""
        if self._free or self._filling or self._in_flight:
            raise FrameError("a second window")
        self._free.extend(range(count))

    def take(self) -> int:
        slot = self._free.popleft()
        self._filling.add(slot)
        return slot

    def put_back(self, slot: int) -> None:
        """Nothing was sent."""
        self._filling.remove(slot)
        self._free.appendleft(slot)

    def sent(self, slot: int) -> None:
        self._filling.remove(slot)
        self._in_flight.add(slot)

    def credited(self, slot: int) -> None:
        """Raises FrameError."""
        if slot not in self._in_flight:
            raise FrameError("credit for a slot that is not in flight")
        self._in_flight.remove(slot)
        self._free.append(slot)


class ReaderSlots:
    """decode's side; one thread lends, any thread credits."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lent: set[int] = set()

    def lend(self, slot: int) -> None:
        """A frame in that slot has arrived. Raises FrameError."""
        if slot >= self._count:
            raise FrameError("slot out of range")
        if slot in self._lent:
            raise FrameError("slot used without credit")
        self._lent.add(slot)

    def credit(self, slot: int) -> None:
        """Raises KeyError: it was credited before."""
        self._lent.remove(slot)
