"""Short writes of several connections that go to the system together, at the latest when the loop
has done its turn.

A client process that one write has woken is still awake at the next, which then costs less; and
what one answer writes in a turn is one segment.
"""

import asyncio
from collections.abc import Iterable

MAX_HELD = 16  # connections; the first of more would wait for the others


class BatchedWrites:
    """Of all connections of a loop."""

    def __init__(self) -> None:
        self._held: dict[asyncio.Transport, list[bytes]] = {}

    def write(self, transport: asyncio.Transport, pieces: Iterable[bytes]) -> None:
        """Write them at the end of the loop's turn, at `flush`, or when MAX_HELD have some."""
        if not self._held:
            asyncio.get_running_loop().call_soon(self._flush_all)
        self._held.setdefault(transport, []).extend(pieces)
        if len(self._held) == MAX_HELD:
            self._flush_all()

    def flush(self, transport: asyncio.Transport) -> None:
        """Write what a connection has; nothing to one that is closing."""
        pieces = self._held.pop(transport, None)
        if pieces and not transport.is_closing():
            transport.write(b"".join(pieces))

    def num_held(self, transport: asyncio.Transport) -> int:
        """Bytes that a connection has."""
        held = self._held.get(transport)
        return sum(map(len, held)) if held else 0

    def _flush_all(self) -> None:
        while self._held:
            self.flush(next(iter(self._held)))
