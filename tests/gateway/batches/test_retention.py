"""--retention-days: completed batches with their files, and usage, are deleted after that many
days."""

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import openai
import pytest
from fakes.router import FakeRouter, saying
from systems.eventually import LIMIT_S, eventually
from systems.stored_gateway import CHAT, change, ended, lines_of, start_batch, stored_gateway

from pdserve.gateway.metrics.usage_log import ROWS_AT_ONCE

pytestmark = pytest.mark.anyio
DAY_S = 86400


def rows(folder: Path, table: str) -> int:
    with closing(sqlite3.connect(folder / "gateway.db", timeout=LIMIT_S)) as database:
        return database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def router() -> FakeRouter:
    return FakeRouter(saying("hello"))


async def files_of(client: openai.AsyncOpenAI) -> set[str]:
    return {file.id async for file in client.files.list()}


async def test_old_batches_and_their_files_are_deleted_and_others_stay(tmp_path):
    async with stored_gateway(router(), tmp_path) as gateway:
        client = gateway.client()
        lines = lines_of(2) + lines_of(1, max_tokens=-2).replace(b"request-", b"bad-")
        old = await ended(client, await start_batch(client, lines))
        young = await ended(client, await start_batch(client, lines_of(2)))
        unused = await client.files.create(file=lines_of(1), purpose="batch")
        assert None not in (old.output_file_id, old.error_file_id)
    async with stored_gateway(router(), tmp_path, runs=False) as gateway:
        waiting = await start_batch(gateway.client(), lines_of(1))
        gone = int(time.time()) - 3 * DAY_S
        await change(
            tmp_path, "UPDATE batches SET created_us = 0 WHERE id IN (?, ?)", old.id, waiting
        )
        await change(tmp_path, "UPDATE batches SET ended_at = ? WHERE id = ?", gone, old.id)
        client = gateway.client()
        await gateway.stored.routes.batches.remove_ended(4 * DAY_S)
        assert (await client.batches.retrieve(old.id)).id == old.id
        await gateway.stored.routes.batches.remove_ended(2 * DAY_S)
        assert {batch.id async for batch in client.batches.list()} == {young.id, waiting}
        open_file = (await client.batches.retrieve(waiting)).input_file_id
        left = {young.input_file_id, young.output_file_id, unused.id, open_file}
        assert await files_of(client) == left
        assert rows(tmp_path, "(SELECT DISTINCT file_id FROM file_pieces)") == len(left)


async def test_a_file_of_two_batches_is_deleted_with_the_last(tmp_path):
    async with stored_gateway(router(), tmp_path) as gateway:
        client = gateway.client()
        file = await client.files.create(file=lines_of(1), purpose="batch")
        made = [
            await client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )
            for _ in range(2)
        ]
        for batch in made:
            await ended(client, batch.id)
        batches = gateway.stored.routes.batches
        for batch, stays in zip(made, (True, False), strict=True):
            await change(tmp_path, "UPDATE batches SET ended_at = 1 WHERE id = ?", batch.id)
            await batches.remove_ended(DAY_S)
            assert (file.id in await files_of(client)) is stays


async def test_any_amount_of_old_usage_is_deleted(tmp_path):
    async with stored_gateway(router(), tmp_path, runs=False) as gateway:
        hour = int(time.time()) // 3600 * 3600
        for start, count in ((hour - 3 * DAY_S, 2 * ROWS_AT_ONCE + 1), (hour - DAY_S, 3)):
            for number in range(count):
                await change(
                    tmp_path, "INSERT INTO usage VALUES ('', ?, 'a', ?, '', 1, 1, 1, 1)",
                    start, str(number),
                )  # fmt: skip
        await gateway.stored.usage.forget(4 * DAY_S)
        assert rows(tmp_path, "usage") == 2 * ROWS_AT_ONCE + 4
        await gateway.stored.usage.forget(2 * DAY_S)
        assert rows(tmp_path, "usage") == 3


async def test_gateways_that_share_a_database_delete_concurrently(tmp_path):
    async with stored_gateway(router(), tmp_path) as gateway:
        client = gateway.client()
        for _ in range(6):
            await ended(client, await start_batch(client, lines_of(1)))
    await change(tmp_path, "UPDATE batches SET ended_at = 1")
    async with (
        stored_gateway(router(), tmp_path, runs=False) as one,
        stored_gateway(router(), tmp_path, runs=False) as other,
    ):
        removing = (part.stored.routes.batches.remove_ended(DAY_S) for part in (one, other))
        await asyncio.gather(*removing)
        for table in ("batches", "files", "file_pieces"):
            assert rows(tmp_path, table) == 0


@pytest.mark.parametrize("days", [0, 1])
async def test_the_setting_deletes_old_data(tmp_path, days):
    """Delete nothing by default."""
    async with stored_gateway(router(), tmp_path) as gateway:
        client = gateway.client()
        batch = await ended(client, await start_batch(client, lines_of(1)))
        await gateway.stored.usage.flush()
    await change(tmp_path, "UPDATE batches SET ended_at = 1")
    await change(tmp_path, "UPDATE usage SET start = 0")
    async with stored_gateway(router(), tmp_path, retention_days=days) as gateway:
        client = gateway.client()
        if days:
            await eventually(lambda: not rows(tmp_path, "batches") and not rows(tmp_path, "usage"))
            with pytest.raises(openai.NotFoundError):
                await client.batches.retrieve(batch.id)
        else:
            await ended(client, await start_batch(client, lines_of(1)))
            assert (await client.batches.retrieve(batch.id)).id == batch.id
            assert rows(tmp_path, "usage") >= 1
