"""The same stores on PostgreSQL, which several hosts can share."""

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import openai
import pytest
from fakes.router import FakeRouter, saying
from systems.eventually import eventually
from systems.postgres import postgres, programs
from systems.stored_gateway import (
    CHAT,
    all_take_part,
    content_of,
    ended,
    lines_of,
    start_batch,
    stored_gateway,
)

from pdserve.gateway.metrics.usage_log import HOUR_S

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def database_url() -> Iterator[str]:
    bin_dir = programs()
    if bin_dir is None:
        pytest.skip("NO POSTGRESQL or no asyncpg: nothing is known of gateways on it")
    with postgres(bin_dir) as url:
        yield url


async def opened(client: openai.AsyncOpenAI) -> None:
    """Wait until the database is open; the gateway already serves before that."""

    async def answers() -> bool:
        try:
            await client.files.list()
        except openai.InternalServerError:
            return False
        return True

    await eventually(answers)


async def test_two_gateways_from_files_to_answers(tmp_path, database_url):
    routers = all_take_part(2)
    options = {"database_url": database_url}
    async with (
        stored_gateway(routers[0], tmp_path, **options) as one,
        stored_gateway(routers[1], tmp_path, **options) as other,
    ):
        client, second = one.client(), other.client()
        await opened(client)
        await opened(second)
        data = bytes(range(256)) * 3000
        file = await client.files.create(file=("a.jsonl", data), purpose="batch")
        assert (await second.files.content(file.id)).content == data
        await client.files.delete(file.id)
        made = [await start_batch(client, lines_of(12, seed=n)) for n in range(6)]
        for batch_id in made:
            batch = await ended(second, batch_id)
            assert batch.status == "completed"
            lines = await content_of(second, batch.output_file_id)
            assert [line["custom_id"] for line in lines] == [f"request-{n}" for n in range(12)]
        assert sum(len(router.starts) for router in routers) == 6 * 12
        assert [batch.id async for batch in client.batches.list(limit=4)] == made[::-1]
        bad = await ended(client, await start_batch(client, b"{\n"))
        assert bad.errors.data[0].code == "invalid_json_line"
        hi: list[Any] = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(
            model="tiny", messages=hi, extra_body={"session_id": "a\0b"}
        )
        for gateway in (one, other):
            await gateway.stored.usage.flush()
        async with one.http() as http:
            report = (await http.get("/v1/usage", params={"group_by": "session_id"})).json()
        counted = {r["session_id"]: r["num_model_requests"] for r in report["data"][-1]["results"]}
        assert counted == dict.fromkeys(made, 12) | {"ab": 1}
        parts = [gateway.stored for gateway in (one, other)]
        keep_s = -2 * HOUR_S  # older than the next hour
        await asyncio.gather(*(part.routes.batches.remove_ended(keep_s) for part in parts))
        await asyncio.gather(*(part.usage.forget(keep_s) for part in parts))
        assert (await client.batches.list()).data == (await second.files.list()).data == []
        async with one.http() as http:
            report = (await http.get("/v1/usage")).json()
        assert not any(bucket["results"] for bucket in report["data"])


@pytest.mark.skipif(find_spec("asyncpg") is None, reason="no asyncpg")
async def test_an_unreachable_database_is_awaited(tmp_path):
    router = FakeRouter(saying("hello"))
    url = "postgresql://nobody:a-password@127.0.0.1:1/none"
    async with (
        stored_gateway(router, tmp_path, database_url=url) as gateway,
        gateway.http() as http,
    ):
        reply = await http.get("/v1/files")
        assert reply.status_code == 503
        assert "a-password" not in reply.text
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        assert (await http.post(CHAT, json=body)).status_code == 200
