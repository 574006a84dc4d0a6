"""Short writes to several connections, handed to the system together, at the latest at the end of
the event loop's turn.

For a write the system wakes the client's process, which takes longer than the write itself. A
process that several clients share is still awake at the next write. All that one answer writes in a
turn is one segment.
"""

import asyncio
import logging
from collections.abc import Iterable

log = logging.getLogger("pdserve.gateway.http")

MAX_TOGETHER = 16  # connections; with more, the first would wait for the others


class BatchedWrites:
    """The pending writes of all connections of an event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Transport, list[bytes]] = {}

    def write(self, transport: asyncio.Transport, pieces: Iterable[bytes]) -> None:
        """Write pieces at the turn's end, at `flush`, or when MAX_TOGETHER connections have
        some."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush_all)
        self._waiting.setdefault(transport, []).extend(pieces)
        if len(self._waiting) == MAX_TOGETHER:
            self._flush_all()

    def flush(self, transport: asyncio.Transport) -> None:
        """Write the pending bytes of a connection; discard them if it is closing."""
        pieces = self._waiting.pop(transport, None)
        if pieces and not transport.is_closing():
            transport.write(b"".join(pieces))

    def num_waiting(self, transport: asyncio.Transport) -> int:
        """Return the pending bytes of a connection."""
        pieces = self._waiting.get(transport)
        return sum(map(len, pieces)) if pieces else 0

    def _flush_all(self) -> None:
        while self._waiting:
            transport = next(iter(self._waiting))
            try:
                self.flush(transport)
            except Exception:  # only this connection fails
                log.exception("cannot write to a connection")
                transport.abort()
