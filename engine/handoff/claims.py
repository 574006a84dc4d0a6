"""The line of claims at decode: strict FIFO, nobody behind the head takes blocks before it has all
of its own. On the engine thread."""

import logging
from collections import deque
from collections.abc import Callable, Iterator

from pdserve.engine.api.errors import EngineError
from pdserve.engine.handoff.incoming import IncomingHandoff, ReceivingEngine
from pdserve.engine.kv.spec import KvSpec

log = logging.getLogger(__name__)


class ClaimQueue:
    """`refused(incoming, reason)` is told of a claim that can never be granted."""

    def __init__(
        self,
        engine: ReceivingEngine,
        spec: KvSpec,
        clock: Callable[[], float],
        refused: Callable[[IncomingHandoff, str], None],
    ) -> None:
        self._engine = engine
        self._spec = spec
        self._clock = clock
        self._refused = refused
        self._line: deque[IncomingHandoff] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[IncomingHandoff]:
        return iter(self._line)

    def add(self, incoming: IncomingHandoff) -> None:
        """It waits for blocks; if it ends before it has them, it is passed over."""
        self._line.append(incoming)

    def granted(self) -> Iterator[IncomingHandoff]:
        """Who has its blocks now, in order, as far as there are blocks."""
        while self._line:
            head = self._line[0]
            if head.state.final:
                self._line.popleft()
                continue
            try:
                reservation = self._engine.reserve(head.request, head.sender)
            except Exception as err:
                if not isinstance(err, EngineError):
                    log.exception("a reservation failed")
                self._line.popleft()
                self._refused(head, f"reservation: {err}")
                continue
            if reservation is None:
                return
            self._line.popleft()
            head.grant(reservation, self._spec, self._clock())
            yield head
