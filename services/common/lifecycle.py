"""Ends a service: signal -> health NOT_SERVING -> drain -> stop. A second signal of the same kind
ends the process immediately, unless it arrives within ECHO_S and so repeats the first one.

Drain and stop are bounded: work that still runs after `drain_s` is cancelled, and each part of a
stop has its own bound. common/options.py and worker/settings.py hold the bounds from which a parent
process knows how long to wait before it kills the service.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import uvloop

from pdserve.services.common.options import ECHO_S, GRACE_S

# Reports a service's state to its parent: "listening", "loading", "ready" or "failed", with
# figures; or "shutdown": the parent must end all processes.
Report = Callable[[str, dict[str, Any]], None]

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run a service's main coroutine on a new event loop; return its exit code."""
    # uvloop resolves names in these threads; its default is 4, asyncio's up to 32.
    os.environ.setdefault("UV_THREADPOOL_SIZE", "32")
    return uvloop.run(main)


def silent(event: str, figures: dict[str, Any]) -> None:
    """Ignore a service's reports of its state: the Report of a service without a parent that reads
    them."""


async def run_until_signal(
    *,
    set_serving: Callable[[bool], None],
    drain: Callable[[], Awaitable[None]],
    stop: Callable[[float], Awaitable[None]],
    drain_s: float,
    grace_s: float = GRACE_S,
    failed: "Iterable[asyncio.Future[Any]]" = (),
) -> int:
    """Run a service until SIGTERM or SIGINT, then drain and stop it; return the exit code.

    `drain` returns when no work runs any more; after `drain_s` it is cancelled. `stop` closes the
    servers within the seconds passed to it, the smaller of `grace_s` and `drain_s`. `failed` are
    futures or tasks of the service that end only by a failure. If one ends before a signal, the
    service stops without a drain and the code is 1; if one raises during the drain, the code is 1.
    Its exception is logged here; a future that ends without an exception must have logged the
    reason itself. Call on the main thread.
    """
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[signal.Signals] = loop.create_future()
    signalled_at = 0.0

    def on_signal(received: signal.Signals) -> None:
        nonlocal signalled_at
        if not signalled.done():
            signalled.set_result(received)
            signalled_at = loop.time()
        elif signalled.result() == received and loop.time() - signalled_at >= ECHO_S:
            # Only the same signal: a parent's SIGTERM often follows a terminal's SIGINT.
            os._exit(128 + received)

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        watched = tuple(failed)
        await asyncio.wait((signalled, *watched), return_when=asyncio.FIRST_COMPLETED)
        set_serving(False)
        if signalled.done():
            log.info(
                "received %s: draining (finishing work) for at most %g s",
                signalled.result().name,
                drain_s,
            )
            await _drain(drain, drain_s, watched)
        code = 0 if signalled.done() and not _any_raised(watched) else _log_failures(watched)
        await stop(min(grace_s, drain_s))
        return code
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _drain(
    drain: Callable[[], Awaitable[None]], drain_s: float, watched: "tuple[asyncio.Future[Any], ...]"
) -> None:
    """Run `drain` until it returns, `drain_s` passes, or a watched future raises; then cancel it if
    it still runs."""
    draining = asyncio.ensure_future(drain())
    try:
        async with asyncio.timeout(drain_s):
            while not draining.done() and not _any_raised(watched):
                pending = [future for future in (draining, *watched) if not future.done()]
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        log.warning(
            "the drain did not end within %g s: cancelling the work that still runs", drain_s
        )
    if not draining.done():
        draining.cancel()
        await asyncio.wait([draining])
    if not draining.cancelled():
        draining.result()


def _any_raised(watched: "tuple[asyncio.Future[Any], ...]") -> bool:
    return any(
        future.done() and not future.cancelled() and future.exception() for future in watched
    )


def _log_failures(watched: "Iterable[asyncio.Future[Any]]") -> int:
    for future in watched:
        if future.cancelled():  # nothing here cancels one before the stop
            log.error("stopping the service: a task was cancelled unexpectedly: %r", future)
        elif future.done() and (error := future.exception()) is not None:
            log.error("stopping the service: a task failed", exc_info=error)
    return 1
