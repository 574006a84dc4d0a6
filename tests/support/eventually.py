"""Waits in asyncio tests for what another task or process brings about."""

import asyncio
from collections.abc import Callable


async def eventually(holds: Callable[[], object], limit_s: float = 5.0) -> None:
    """Return once `holds()` is true. Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 (other tasks' state has no event)
            await asyncio.sleep(0.005)
