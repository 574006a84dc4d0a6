"""A pool of text process children for one kind of work, with a fair queue of requests."""

import asyncio
import logging
from collections.abc import Callable

from pdserve.gateway.text_processes.host import TextChild, late_error, no_process_error
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.tenants.fairness import FairQueue

log = logging.getLogger(__name__)


class Children:
    """Lends children to requests, one request per child at a time; owners take turns."""

    def __init__(
        self, fork: Callable[["Children"], None], max_children: int, wait_s: float
    ) -> None:
        """Make a pool of up to `max_children`; a request waits up to `wait_s` for one. `fork`
        starts a child that is later passed to `offer`, or raises OSError."""
        self._fork = fork
        self._max_children = max_children
        self._free = max_children  # number of children that may still be started
        self._wait_s = wait_s
        self._idle: list[TextChild] = []
        self._waiting: FairQueue[asyncio.Future[TextChild]] = FairQueue()

    async def take(self, owner: bytes) -> TextChild:
        """Wait for an idle child. Raises ServiceError UNAVAILABLE if there is none in time."""
        while self._idle:
            if not (child := self._idle.pop()).has_ended:
                return child
            self._free += 1
        future: asyncio.Future[TextChild] = asyncio.get_running_loop().create_future()
        self._waiting.push(owner, future)
        if self._free:
            self._start()
        try:
            async with asyncio.timeout(self._wait_s):
                try:
                    return await future
                except asyncio.CancelledError:
                    if future.done() and not future.cancelled() and future.exception() is None:
                        # A child arrived together with the cancellation.
                        self.offer(future.result())
                    raise
        except TimeoutError:
            raise late_error() from None

    def offer(self, child: TextChild) -> None:
        """Add an idle child, or replace it if it has ended."""
        if child.has_ended:
            self.replace()
            return
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():  # otherwise the client has disconnected
                waiting.set_result(child)
                return
        self._idle.append(child)

    def replace(self) -> None:
        """Account for an ended child, and start another if requests wait."""
        self._free += 1
        if self._waiting:
            self._start()

    def _start(self) -> None:
        """Start a child. On failure, running children serve the queue; if none runs, fail it."""
        try:
            self._fork(self)
        except OSError as error:
            log.warning("cannot start a text process: %s", error)
            if self._free == self._max_children:
                self.fail(no_process_error)
        else:
            self._free -= 1

    def fail(self, make_error: Callable[[], ServiceError]) -> None:
        """Fail all waiting requests with `why()`."""
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():
                waiting.set_exception(make_error())
