"""Limits how many lines of batches run at once: few, and only one while other requests wait."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdserve.services.host.tenants.fair_semaphore import FairSemaphore

PAUSE_S = 0.05  # between two checks for waiting requests


class LineSlots:
    """At most `most` lines at once; tenants take turns. While `num_waiting()` client requests have
    no first token, a line starts only if no other one runs, so that batches progress without
    delaying clients."""

    def __init__(self, max_running: int, num_waiting: Callable[[], int]) -> None:
        self.max_running = max_running
        self._num_waiting = num_waiting
        self._turns = FairSemaphore(max_running)
        self.running = 0

    @asynccontextmanager
    async def turn(self, owner: bytes) -> AsyncIterator[None]:
        """Run one line in the block."""
        async with self._turns.turn(owner):
            while self.running and self._num_waiting():  # noqa: ASYNC110  (no request tells)
                await asyncio.sleep(PAUSE_S)
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1
