"""Batches outlive the gateway that runs them: no line is lost, and none is written twice."""

import asyncio
import signal
import sqlite3
from collections import Counter

import openai
import pytest
from fakes.router import FakeRouter, saying
from fakes.router_process import serve_router
from systems.cluster_secret import SECRET
from systems.eventually import LIMIT_S, eventually
from systems.gateway_process import GatewayProcess
from systems.stored_gateway import (
    all_take_part,
    change,
    content_of,
    ended,
    holding_after,
    lines_of,
    start_batch,
    stored_gateway,
)

from pdserve.gateway.batches.batches import LEASE_S, BatchLease, LeaseWatch
from pdserve.gateway.main import run
from pdserve.gateway.settings import GatewaySettings

pytestmark = pytest.mark.anyio
LINES = 60


def requests_of(router: FakeRouter) -> Counter[bytes]:
    """The number of requests for each prompt."""
    return Counter(str(list(start.prompt_ids)).encode() for start in router.starts)


async def check_whole(client: openai.AsyncOpenAI, batch_id: str, count: int = LINES) -> None:
    batch = await ended(client, batch_id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (count, count, 0)
    lines = await content_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"request-{n}" for n in range(count)]


async def test_a_batch_survives_kill_9(tmp_path):
    """Kill the gateway after the first line and before the last, while lines are being answered."""
    hold = asyncio.Event()
    servicer, host, address = await serve_router(FakeRouter(holding_after(25, hold)))
    database = tmp_path / "gateway.db"
    settings = {"database_url": f"sqlite:///{database}", "batch_concurrency": 8}
    try:
        with GatewayProcess(address, **settings) as gateway:
            async with openai.AsyncOpenAI(api_key="none", base_url=f"{gateway.url}/v1") as client:
                batch_id = await start_batch(client, lines_of(LINES))

                async def in_the_middle() -> bool:
                    counts = (await client.batches.retrieve(batch_id)).request_counts
                    assert counts is not None
                    return counts.completed == 25 and len(servicer.router.starts) == 25 + 8

                await eventually(in_the_middle)
            gateway.process.send_signal(signal.SIGKILL)
            assert gateway.process.wait(LIMIT_S) == -signal.SIGKILL
        with sqlite3.connect(database) as found:
            (left,) = found.execute("SELECT count(*) FROM batch_lines").fetchone()
        found.close()
        assert left == LINES - 25
        before = len(servicer.router.starts)
        hold.set()
        with GatewayProcess(address, lease_s=1.5, **settings) as gateway:
            async with openai.AsyncOpenAI(api_key="none", base_url=f"{gateway.url}/v1") as client:
                await check_whole(client, batch_id)
        # finished lines are not run again
        assert len(servicer.router.starts) - before == LINES - 25
    finally:
        await host.stop(0)


async def test_sigterm_lets_running_lines_finish_and_exits(tmp_path):
    hold = asyncio.Event()
    servicer, host, address = await serve_router(FakeRouter(holding_after(9, hold)))
    settings = {"database_url": f"sqlite:///{tmp_path}/gateway.db", "batch_concurrency": 4}
    try:
        with GatewayProcess(address, **settings) as gateway:
            async with openai.AsyncOpenAI(api_key="none", base_url=f"{gateway.url}/v1") as client:
                await start_batch(client, lines_of(LINES))
                await eventually(lambda: len(servicer.router.starts) == 13)
            gateway.process.send_signal(signal.SIGTERM)
            hold.set()
            assert await asyncio.to_thread(gateway.process.wait, LIMIT_S) == 0
    finally:
        await host.stop(0)
    with sqlite3.connect(tmp_path / "gateway.db") as found:
        (left,) = found.execute("SELECT count(*) FROM batch_lines").fetchone()
        (owner,) = found.execute("SELECT owner FROM batches").fetchone()
        (counted,) = found.execute("SELECT sum(requests) FROM usage").fetchone()
    found.close()
    answered = len(servicer.router.starts)
    assert 13 <= answered < LINES
    assert (left, owner, counted) == (LINES - answered, "", answered)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nonsense", "--database-url"),
        ("mysql://host/name", "--database-url"),
        ("sqlite:////nowhere/at/all/gateway.db", "is not a writable folder"),
    ],
)
def test_an_invalid_url_is_named(url, why):
    settings = GatewaySettings(
        port=0, routers=("127.0.0.1:1",), cluster_secret=(SECRET,), database_url=url
    )
    with pytest.raises((ValueError, OSError), match=why):
        run(settings)


async def test_two_gateways_share_a_database(tmp_path):
    routers = all_take_part(2)
    async with (
        stored_gateway(routers[0], tmp_path) as one,
        stored_gateway(routers[1], tmp_path) as other,
    ):
        client, second = one.client(), other.client()
        batches = [await start_batch(client, lines_of(15, seed=n)) for n in range(8)]
        for batch_id in batches:
            await check_whole(second, batch_id, 15)
    assert sum((requests_of(router) for router in routers), Counter()).total() == 8 * 15


async def test_a_stopping_gateway_returns_its_batches(tmp_path):
    """Let running lines finish; the next gateway does not wait for the lease to expire."""
    hold = asyncio.Event()
    first, second = FakeRouter(holding_after(9, hold)), FakeRouter(saying("hello"))
    async with stored_gateway(second, tmp_path, runs=False) as shown:
        client = shown.client()
        async with stored_gateway(first, tmp_path, batch_concurrency=4) as stopped:
            batch_id = await start_batch(stopped.client(), lines_of(30))
            await eventually(lambda: len(first.starts) == 13)
            draining = asyncio.create_task(stopped.stored.drain())
            await asyncio.sleep(0)
            hold.set()
            await asyncio.wait_for(draining, LIMIT_S)
            counts = (await client.batches.retrieve(batch_id)).request_counts
            assert counts is not None
            assert counts.completed == 13  # no running line was cut off, and no new one was started
        async with stored_gateway(second, tmp_path) as following:
            await check_whole(following.client(), batch_id, 30)
    assert (len(first.starts), len(second.starts)) == (13, 17)


async def test_a_gateway_that_lost_its_lease_changes_nothing(tmp_path):
    """Pause a gateway until another has claimed its batch, then resume it."""
    hold = asyncio.Event()
    first, second = FakeRouter(holding_after(9, hold)), FakeRouter(saying("hello"))
    async with stored_gateway(first, tmp_path, batch_concurrency=4) as gateway:
        client = gateway.client()
        batch_id = await start_batch(client, lines_of(30))
        await eventually(lambda: len(first.starts) == 13)
        await change(tmp_path, "UPDATE batches SET owner = ''")
        async with stored_gateway(second, tmp_path) as other:
            await eventually(lambda: second.starts)
            hold.set()
            await check_whole(other.client(), batch_id, 30)
    assert len(first.starts) + len(second.starts) >= 30


def test_a_lease_is_free_when_its_beat_stops():
    watch = LeaseWatch()
    live, dead, nobodys = BatchLease("a", "x", 1), BatchLease("b", "y", 1), BatchLease("c", "", 0)
    assert watch.free([live, dead, nobodys], 0.0) == [nobodys]
    assert watch.free([live._replace(beat=2), dead], LEASE_S - 0.1) == []
    assert watch.free([live._replace(beat=2), dead], LEASE_S) == [dead]
    taken = dead._replace(owner="x", beat=2)
    assert watch.free([live._replace(beat=3), taken], LEASE_S + 1) == []
