"""A worker's streams to its routers, and the loop's side of its engine thread's answers."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

END_S = 1.0  # for what was said last to be taken


class Session(Protocol):
    """One router's stream."""

    @property
    def outbox(self) -> Any: ...


class Sessions:
    """Those that are open. A worker that has drained ends them before it leaves its routers, so
    that none takes it for lost before it has heard the last words."""

    def __init__(self) -> None:
        self._open: set[Session] = set()
        self._changed = asyncio.Event()

    def opened(self, session: Session) -> None:
        self._open.add(session)

    def closed(self, session: Session) -> None:
        """Its stream is over."""
        self._open.discard(session)
        self._changed.set()

    async def end(self) -> None:
        """Ends the streams after all that was put; returns when they are over, or in END_S."""
        ending = set(self._open)
        for session in ending:
            session.outbox.close()
        try:
            async with asyncio.timeout(END_S):
                while ending & self._open:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return


def when_done(future: "Future[Any]", then: Callable[["Future[Any]"], None]) -> None:
    """Call then(future) on the loop, in the order in which the engine thread answers."""
    loop = asyncio.get_running_loop()

    def done(future: "Future[Any]") -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(then, future)

    future.add_done_callback(done)
