"""Merges several asynchronous streams into one, in order of arrival.

Ownership: the merged stream owns its sources; closing it, or an error in one, closes all.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_AHEAD = 64  # items read ahead of the consumer


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all sources. An exception in one is raised here after the others are closed."""
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    queue: asyncio.Queue[T | _End] = asyncio.Queue(_AHEAD)

    async def pump(source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await queue.put(item)
        except Exception as error:
            await queue.put(_End(error))
        else:
            await queue.put(_End(None))

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            received = await queue.get()
            if not isinstance(received, _End):
                yield received
            elif received.error is not None:
                raise received.error
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
