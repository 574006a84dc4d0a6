"""Batches leave database connections for client requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fakes.router import FakeRouter, saying
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from systems.eventually import LIMIT_S, eventually
from systems.stored_gateway import ended, lines_of, start_batch, stored_gateway

from pdserve.gateway.batches import Files
from pdserve.gateway.storage.database import Database

pytestmark = pytest.mark.anyio


async def test_slow_database_reads_of_lines_do_not_delay_clients(tmp_path, monkeypatch):
    go, num_open = asyncio.Event(), 0
    reading = Database.reading

    @asynccontextmanager
    async def slowly(database: Database) -> AsyncIterator[AsyncSession]:
        nonlocal num_open
        async with reading(database) as session:
            task = asyncio.current_task()
            if task is not None and task.get_name() == Files.read.__qualname__:
                await session.execute(text("SELECT 1"))  # takes a connection
                num_open += 1
                await go.wait()
            yield session

    monkeypatch.setattr(Database, "reading", slowly)
    router = FakeRouter(saying("hello"))
    async with stored_gateway(router, tmp_path, batch_concurrency=64) as gateway:
        client = gateway.client()
        batch_id = await start_batch(client, lines_of(64))
        await eventually(lambda: num_open)
        await asyncio.sleep(0.2)
        async with gateway.http() as http:
            reply = await asyncio.wait_for(http.get("/v1/responses/resp_x"), LIMIT_S)
        assert reply.status_code == 404
        go.set()
        assert (await ended(client, batch_id)).request_counts.completed == 64
