"""Short writes to several connections that are handed to the system together, at the latest when
the event loop has done its turn.

The system wakes a client's process for a write, which takes longer than the write itself. One that
several clients share is still awake at the next write. What one answer writes in a turn is one
segment.
"""

import asyncio
import logging
from collections.abc import Iterable

log = logging.getLogger("pdserve.gateway.http")

MAX_TOGETHER = 16  # connections; the first of more would wait for the others


class BatchedWrites:
    """One serves all connections of an event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Transport, list[bytes]] = {}

    def write(self, transport: asyncio.Transport, pieces: Iterable[bytes]) -> None:
        """Write them at the end of the loop's turn, at `flush`, or when MAX_TOGETHER have some."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush_all)
        self._waiting.setdefault(transport, []).extend(pieces)
        if len(self._waiting) == MAX_TOGETHER:
            self._flush_all()

    def flush(self, transport: asyncio.Transport) -> None:
        """Write what a connection has; nothing to one that is closing."""
        pieces = self._waiting.pop(transport, None)
        if pieces and not transport.is_closing():
            transport.write(b"".join(pieces))

    def num_waiting(self, transport: asyncio.Transport) -> int:
        """Bytes that a connection has."""
        pieces = self._waiting.get(transport)
        return sum(map(len, pieces)) if pieces else 0

    def _flush_all(self) -> None:
        while self._waiting:
            transport = next(iter(self._waiting))
            try:
                self.flush(transport)
            except Exception:  # of this connection alone
                log.exception("a connection cannot be written to")
                transport.abort()
