"""The queue of Claims at decode: no attempt gets blocks before the one ahead of it has all of its
own. It is FIFO, but that a tenant's attempts are in order of priority in the places that the tenant
has. Runs on the engine thread."""

import logging
from collections import deque
from collections.abc import Callable, Iterator

from pdserve.engine.api.errors import EngineError
from pdserve.engine.handoff.incoming import IncomingHandoff, ReceivingEngine
from pdserve.engine.handoff.open_blocks import WritableKv
from pdserve.engine.scheduling.turns import by_priority

log = logging.getLogger(__name__)


class ClaimQueue:
    """`refused(incoming, reason)` is called for a Claim that can never be granted."""

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
        """An attempt waits for blocks; if it ends before it has them, it leaves the queue."""
        self._queue.append(incoming)
        ordered = by_priority(
            self._queue, lambda it: it.request.tenant, lambda it: it.request.priority
        )
        self._queue = deque(ordered)

    def granted(self) -> Iterator[IncomingHandoff]:
        """Reserves blocks for the attempts in order, as far as there are blocks; yields each."""
        while self._queue:
            head = self._queue[0]
            if head.state.final:
                self._queue.popleft()
                continue
            try:
                reservation = self._engine.reserve(head.request, head.sender)
            except Exception as err:
                if not isinstance(err, EngineError):
                    log.exception("a reservation failed")
                self._queue.popleft()
                self._refused(head, f"reservation: {err}")
                continue
            if reservation is None:
                return
            try:
                ready = self._kv.ready()
            except Exception:
                self._engine.release(reservation)  # nobody else knows of it
                raise
            self._queue.popleft()
            head.grant(reservation, self._kv.spec, self._clock(), ready)
            yield head
