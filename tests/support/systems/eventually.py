"""Waits of tests for other tasks, threads or processes; tests wait nowhere else.

The limit ends a test that would otherwise hang; it is generous, so that no test's result depends
on how busy the machine is. A test of a time limit measures it in steps, chunks or messages.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

LIMIT_S = 60.0


async def eventually(
    holds: Callable[[], Any | Awaitable[Any]], what: object = "", limit_s: float = LIMIT_S
) -> Any:
    """Return the value of `holds()` once it is true; `holds` may be a coroutine function.

    Raises TimeoutError with `what`, which may be a function that describes the current state.
    """
    deadline = time.monotonic() + limit_s
    while True:
        value = holds()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise _late(what, limit_s)
        await asyncio.sleep(0.005)


def wait_until(
    holds: Callable[[], Any], what: object = "", limit_s: float = LIMIT_S, pause_s: float = 0.01
) -> Any:
    """Like `eventually`, for a test that is not a coroutine."""
    deadline = time.monotonic() + limit_s
    while True:
        if value := holds():
            return value
        if time.monotonic() > deadline:
            raise _late(what, limit_s)
        time.sleep(pause_s)


def _late(what: object, limit_s: float) -> TimeoutError:
    return TimeoutError(f"not within {limit_s:g} s: {what() if callable(what) else what}")
