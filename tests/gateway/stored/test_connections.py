"""Batches leave connections of the database to requests of clients."""

import asyncio

import pytest
from eventually import LIMIT_S, eventually
from fake_router import FakeRouter, saying
from sqlalchemy import text
from stored_gateway import ended, lines_of, start_batch, stored_gateway

from pdserve.gateway.batches.files import Files
from pdserve.gateway.storage.database import Database, in_own_task

pytestmark = pytest.mark.anyio


async def test_lines_that_take_long_in_the_database_hold_up_no_client(tmp_path, monkeypatch):
    go, num_open = asyncio.Event(), 0
    read = Files.read

    @in_own_task
    async def hold(database: Database) -> None:
        nonlocal num_open
        async with database.reading() as session:
            await session.execute(text("SELECT 1"))
            num_open += 1
            await go.wait()

    async def slowly(files: Files, *part: object) -> bytes:
        await hold(files._db)
        return await read(files, *part)

    monkeypatch.setattr(Files, "read", slowly)
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
