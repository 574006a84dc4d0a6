"""Coroutine tests run on one event loop, so that none is closed under grpc.aio."""

import asyncio

import pytest

pytestmark = pytest.mark.anyio
loops: list[asyncio.AbstractEventLoop] = []


@pytest.mark.parametrize("number", [1, 2])
async def test_every_test_has_the_same_loop(number: int) -> None:
    loops.append(asyncio.get_running_loop())
    assert len(set(loops)) == 1
