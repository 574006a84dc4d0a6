"""Children of a text process that do one kind of work, and who waits for one of them."""

import asyncio
import logging
from collections.abc import Callable

from pdserve.gateway.text_processes.host import TextChild, late, no_process
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.tenants.fairness import FairQueue

log = logging.getLogger(__name__)


class Children:
    """Each child does one piece of work at a time; owners take turns."""

    def __init__(self, fork: Callable[["Children"], None], most: int, wait_s: float) -> None:
        """`fork` begins one, to be offered here; it raises OSError. There are `most` at once, for
        one of which work may wait `wait_s`."""
        self._fork = fork
        self._most = most
        self._free = most  # that may still be started
        self._wait_s = wait_s
        self._idle: list[TextChild] = []
        self._waiting: FairQueue[asyncio.Future[TextChild]] = FairQueue()

    async def take(self, owner: bytes) -> TextChild:
        """One that has nothing to do. Raises ServiceError UNAVAILABLE."""
        while self._idle:
            if not (child := self._idle.pop()).has_ended:
                return child
            self._free += 1
        mine: asyncio.Future[TextChild] = asyncio.get_running_loop().create_future()
        self._waiting.push(owner, mine)
        if self._free:
            self._start()
        try:
            async with asyncio.timeout(self._wait_s):
                try:
                    return await mine
                except asyncio.CancelledError:
                    if mine.done() and not mine.cancelled() and mine.exception() is None:
                        self.offer(mine.result())  # it came at the same time
                    raise
        except TimeoutError:
            raise late() from None

    def offer(self, child: TextChild) -> None:
        """A child that has nothing to do."""
        if child.has_ended:
            self.replace()
            return
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():  # otherwise its client has gone
                waiting.set_result(child)
                return
        self._idle.append(child)

    def replace(self) -> None:
        """A child has gone."""
        self._free += 1
        if self._waiting:
            self._start()

    def _start(self) -> None:
        """Begins one of the free children. If that fails, those that run serve all who wait."""
        try:
            self._fork(self)
        except OSError as error:
            log.warning("a text process cannot be started: %s", error)
            if self._free == self._most:
                self.fail(no_process)
        else:
            self._free -= 1

    def fail(self, why: Callable[[], ServiceError]) -> None:
        """Nobody waits any more."""
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():
                waiting.set_exception(why())
