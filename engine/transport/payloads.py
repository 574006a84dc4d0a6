"""decode: private memory for payloads on their way from a slot into the pool.

Its reader thread takes and keeps; any thread says done. Buffers are as large as a slot and are used
again, the newest first: it is still in a cache.
"""

import mmap

from pdserve.engine.handoff.frames import FrameHeader

EAGER = 4  # payloads that may wait here while their slots are in use again


class Payloads:
    """Of one connection."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._free: list[memoryview] = []
        self._kept: dict[tuple[bytes, int], tuple[memoryview, bool]] = {}  # by ticket, sequence

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def take(self) -> memoryview:
        """Memory for a payload."""
        if self._free:
            return self._free.pop()
        # A page's alignment doubles the speed of copies into it.
        return memoryview(mmap.mmap(-1, self._slot_bytes))

    def keep(self, header: FrameHeader, buffer: memoryview) -> bool:
        """The frame's payload is in it until `done`; whether its slot is to be credited now."""
        eager = len(self._kept) < EAGER
        self._kept[header.ticket, header.sequence] = buffer, eager
        return eager

    def done(self, header: FrameHeader) -> bool:
        """Whether its slot is to be credited now. Raises KeyError: it was done before."""
        buffer, eager = self._kept.pop((header.ticket, header.sequence))
        self._free.append(buffer)
        return not eager
