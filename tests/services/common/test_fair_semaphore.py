"""A semaphore whose waiting owners take turns."""

import asyncio
from random import Random

import pytest
from systems.eventually import eventually

from pdserve.services.common.fairness import FairSemaphore

pytestmark = pytest.mark.anyio


async def test_owners_are_served_in_turn(anyio_backend: str) -> None:
    turns, served, go_on = FairSemaphore(1), list[bytes](), asyncio.Event()

    async def one(owner: bytes) -> None:
        async with turns.turn(owner):
            served.append(owner)
            await go_on.wait()

    first = asyncio.create_task(one(b"flood"))
    await eventually(lambda: served)
    rest = [asyncio.create_task(one(owner)) for owner in (b"flood", b"flood", b"flood", b"other")]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(first, *rest)
    assert served == [b"flood", b"flood", b"other", b"flood", b"flood"]


async def test_no_turn_is_lost_when_waiters_leave(anyio_backend: str) -> None:
    for seed in range(30):
        rng, turns, running, most = Random(seed), FairSemaphore(2), 0, 0

        async def one(turns: FairSemaphore = turns, rng: Random = rng) -> None:
            nonlocal running, most
            async with turns.turn(b"%d" % rng.randrange(3)):
                running += 1
                most = max(most, running)
                try:
                    await asyncio.sleep(0)
                finally:
                    running -= 1

        tasks = [asyncio.create_task(one()) for _ in range(30)]
        for _ in range(5):
            await asyncio.sleep(0)
            rng.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most == 2
        entered = [turns.turn(b"a"), turns.turn(b"b")]
        for turn in entered:  # both are free again
            await asyncio.wait_for(turn.__aenter__(), 1.0)
