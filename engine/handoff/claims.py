"""The queue of Claims at decode: no attempt gets blocks before the attempt ahead of it has all of
its blocks.

The order is FIFO, except that a tenant's attempts are sorted by priority within the places that the
tenant holds. Runs on the engine thread.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator

from pdserve.engine.api import EngineError
from pdserve.engine.handoff.incoming import IncomingHandoff, ReceivingEngine
from pdserve.engine.handoff.open_blocks import WritableKv
from pdserve.engine.scheduling import by_priority

log = logging.getLogger(__name__)


class ClaimQueue:
    """Grants Claims in order; calls `refused(incoming, reason)` for a Claim that can never be
    granted."""

    def __init__(
        self,
        engine: ReceivingEngine,
        kv: WritableKv,
        clock: Callable[[], float],
        refused: Callable[[IncomingHandoff, str], None],
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._clock = clock
        self._refused = refused
        self._queue: deque[IncomingHandoff] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[IncomingHandoff]:
        return iter(self._queue)

    def add(self, incoming: IncomingHandoff) -> None:
        """Add an attempt that waits for blocks; one that ends first leaves the queue."""
        self._queue.append(incoming)
        ordered = by_priority(
            self._queue,
            lambda incoming: incoming.request.tenant,
            lambda incoming: incoming.request.priority,
        )
        self._queue = deque(ordered)

    def granted(self) -> Iterator[IncomingHandoff]:
        """Reserve blocks for the attempts in order while there are enough blocks; yield each
        attempt."""
        while self._queue:
            head = self._queue[0]
            if head.state.final:
                self._queue.popleft()
                continue
            try:
                reservation = self._engine.reserve(head.request, head.sender)
            except Exception as err:
                if not isinstance(err, EngineError):
                    log.exception("reserving blocks for a hand-off failed")
                self._queue.popleft()
                self._refused(head, f"reservation: {err}")
                continue
            if reservation is None:
                return
            try:
                ready = self._kv.ready()
            except Exception:
                self._engine.release(reservation)  # no other object knows this reservation
                raise
            self._queue.popleft()
            head.grant(reservation, self._kv.spec, self._clock(), ready)
            yield head
