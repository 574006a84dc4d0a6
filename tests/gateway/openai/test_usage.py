"""/v1/usage: the usage of a key, by time, model and session."""

import asyncio
import hashlib
import json
import time
from types import SimpleNamespace

import httpx
import pytest
from fakes.router import FakeRouter, saying, served, tokens
from systems.eventually import eventually
from systems.served_gateway import served_gateway
from systems.stored_gateway import CHAT, ended, lines_of, start_batch, stored_gateway

from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import AT_ONCE
from pdserve.gateway.metrics import RequestUsage
from pdserve.gateway.metrics.usage_log import COUNTS, UsageLog, UsageQuery, UsageRow
from pdserve.gateway.openai.stored.routes import usage_page
from pdserve.gateway.storage.database import Database
from pdserve.services.common.tenants import Tenant

pytestmark = pytest.mark.anyio
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
HOUR, DAY = 3600, 86400
NOON = 20_000 * DAY + 12 * HOUR


async def results(http, **params):
    """The results of all buckets, once there are any."""

    async def found():
        report = (await http.get("/v1/usage", params=params)).json()
        return [result for bucket in report["data"] for result in bucket["results"]]

    return await eventually(found)


async def test_recorded_usage_equals_reported_usage(tmp_path):
    async with stored_gateway(FakeRouter(saying("hello world", cached=2)), tmp_path) as gateway:
        async with gateway.http() as http:
            usages = [(await http.post(CHAT, json=BODY)).json()["usage"] for _ in range(3)]
            (result,) = await results(http)
        await gateway.stored.usage.flush()
        async with gateway.http() as http:
            (result,) = await results(http)
    assert result == {
        "object": "usage.result",
        "num_model_requests": 3,
        "input_tokens": sum(usage["prompt_tokens"] for usage in usages),
        "input_cached_tokens": 6,
        "output_tokens": sum(usage["completion_tokens"] for usage in usages),
        "model": None,
        "api_key_id": None,
        "session_id": None,
    }


async def test_usage_by_model_and_session(tmp_path):
    """Take the session from the request, then from the header, then from the user."""
    cards = [served("tiny"), served("other")]
    router = FakeRouter(saying("hello"), [card for card, _ in cards], cards[0][1])
    async with stored_gateway(router, tmp_path, runs=False) as gateway, gateway.http() as http:
        for body, header in [
            ({"session_id": "a", "user": "u"}, "h"),
            ({"user": "u"}, "h"),
            ({"user": "u"}, ""),
            ({}, ""),
            ({"model": "other", "session_id": "a"}, ""),
            ({}, "not good: " + "x" * 200),
        ]:
            headers = {"x-session-id": header} if header else {}
            reply = await http.post(CHAT, json={**BODY, **body}, headers=headers)
            assert reply.status_code == 200, reply.text
        await gateway.stored.usage.flush()
        found = await results(http, group_by=["model", "session_id"])
        counted = {(r["model"], r["session_id"]): r["num_model_requests"] for r in found}
        assert counted == {
            ("tiny", "a"): 1,
            ("tiny", "h"): 1,
            ("tiny", "u"): 1,
            ("tiny", ""): 2,
            ("other", "a"): 1,
        }
        (only,) = await results(http, session_ids="a", models="tiny")
        assert only["num_model_requests"] == 1
        too_long = await http.post(CHAT, json={**BODY, "session_id": "x" * 129})
        assert too_long.json()["error"]["param"] == "session_id"


# For each API that uses a model, a body and the field that names its user.
APIS = {
    "/v1/chat/completions": (BODY, lambda user: {"user": user}),
    "/v1/completions": ({"model": "tiny", "prompt": "hi"}, lambda user: {"user": user}),
    "/v1/responses": ({"model": "tiny", "input": "hi"}, lambda user: {"user": user}),
    "/v1/messages": ({**BODY, "max_tokens": 3}, lambda user: {"metadata": {"user_id": user}}),
    "/v1/embeddings": ({"model": "embedder", "input": "hi"}, lambda user: {"user": user}),
    "/v1/rerank": (
        {"model": "reranker", "query": "q", "documents": ["d"]}, lambda user: {"user": user}
    ),
    "/v1/score": (
        {"model": "reranker", "text_1": "q", "text_2": "d"}, lambda user: {"user": user}
    ),
}  # fmt: skip


async def test_every_api_has_the_same_rule_for_the_session():
    """Take the session from the body, else the header, else the user, hashed if it is too long."""
    with served_gateway() as url:
        async with httpx.AsyncClient(base_url=url) as http:
            for number, (path, (body, user)) in enumerate(APIS.items()):
                own = {} if path == "/v1/messages" else {"session_id": f"own {number}"}
                header = {"x-session-id": f"header-{number}"}
                for more, headers in (
                    (own | user("no"), header if own else {"x-session-id": "other"}),
                    (user("no"), header),
                    (user(f"user {number}"), {}),
                    (user(f"{number}" + "x" * 128), {}),
                    ({}, {}),
                ):
                    reply = await http.post(path, json={**body, **more}, headers=headers)
                    assert reply.status_code == 200, reply.text

            async def all_counted():
                found = await results(http, group_by="session_id")
                counts = {r["session_id"]: r["num_model_requests"] for r in found}
                return counts if sum(counts.values()) == 5 * len(APIS) else None

            counts = await eventually(all_counted)
    expected = {"": len(APIS), "other": 1}
    for number, path in enumerate(APIS):
        own = {} if path == "/v1/messages" else {f"own {number}": 1}
        long = hashlib.sha256((f"{number}" + "x" * 128).encode()).hexdigest()
        expected |= own | {f"header-{number}": 1, f"user {number}": 1, f"sha256:{long}": 1}
    assert counts == expected


async def test_a_batch_is_a_session(tmp_path):
    async with stored_gateway(FakeRouter(saying("hello")), tmp_path) as gateway:
        client = gateway.client()
        batch = await ended(client, await start_batch(client, lines_of(5, session_id="mine")))
        await gateway.stored.usage.flush()
        async with gateway.http() as http:
            found = await results(http, group_by="session_id")
    assert [(r["session_id"], r["num_model_requests"]) for r in found] == [(batch.id, 5)]


async def test_a_key_sees_only_its_usage(tmp_path):
    keys = ("first", "second")
    async with (
        stored_gateway(FakeRouter(saying("hello")), tmp_path, keys, runs=False) as gateway,
        gateway.http("first") as http,
        gateway.http("second") as other,
    ):
        await http.post(CHAT, json=BODY)
        await gateway.stored.usage.flush()
        (result,) = await results(http, group_by="api_key_id")
        assert len(result["api_key_id"]) == 12
        report = (await other.get("/v1/usage")).json()
        assert not any(bucket["results"] for bucket in report["data"])
        assert (await http.post(CHAT, json={**BODY, "max_tokens": -2})).status_code == 400
        await gateway.stored.usage.flush()
        (result,) = await results(http)
        assert result["num_model_requests"] == 1  # a refused request has no usage


async def test_a_partial_answer_is_counted_as_far_as_generated(tmp_path):
    async def play(router, start):
        yield tokens(start, router.encode("hello"), 0)
        yield tokens(start, router.encode(" w"), 1)
        raise RuntimeError("the router has gone")

    async with (
        stored_gateway(FakeRouter(play), tmp_path, runs=False) as gateway,
        gateway.http() as http,
    ):
        reply = await http.post(CHAT, json=BODY)
        assert reply.status_code == 500
        await gateway.stored.usage.flush()
        (result,) = await results(http)
        assert result["output_tokens"] == 2
        assert result["input_tokens"] > 0


async def test_buckets_and_pages(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    await database.start()
    now = [float(NOON)]
    usage = UsageLog(database, lambda: now[0])
    for hour in (0, 1, 1, 13, 37):  # noon, one, the next day at one, the day after at one
        now[0] = NOON + hour * HOUR + 59 * 60
        usage.count(Caller("r"), "tiny", RequestUsage(10, 4, 3))
    await usage.flush()
    await database.close()
    start = NOON - 12 * HOUR
    async with (
        stored_gateway(FakeRouter(saying("hello")), tmp_path) as gateway,
        gateway.http() as http,
    ):

        async def page(**params):
            return (await http.get("/v1/usage", params=params)).json()

        days = await page(start_time=start, end_time=start + 3 * DAY)
        assert [bucket["start_time"] for bucket in days["data"]] == [
            start, start + DAY, start + 2 * DAY,
        ]  # fmt: skip
        requests = [b["results"][0]["num_model_requests"] for b in days["data"]]
        assert requests == [3, 1, 1]
        assert (days["has_more"], days["next_page"]) == (False, None)
        assert days["data"][0]["results"][0]["input_tokens"] == 30
        hours = await page(
            start_time=NOON + 60, end_time=NOON + 3 * HOUR, bucket_width="1h", limit=2
        )
        assert [len(bucket["results"]) for bucket in hours["data"]] == [1, 1]
        assert hours["has_more"]
        rest = await page(
            end_time=NOON + 3 * HOUR, bucket_width="1h", limit=2, page=hours["next_page"]
        )
        assert [bucket["results"] for bucket in rest["data"]] == [[]]
        assert not rest["has_more"]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"bucket_width": "1m"}, "bucket_width"),
        ({"group_by": "project_id"}, "group_by"),
        ({"start_time": "yesterday"}, "start_time"),
        ({"start_time": 10, "end_time": 10}, "start_time"),
        ({"end_time": -1}, "end_time"),
        ({"limit": 32}, "limit"),
        ({"page": "next"}, "page"),
        ({"project_ids": "p"}, "project_ids"),
        ({"models": ["m"] * 101}, "models"),
    ],
)
async def test_invalid_reports_are_refused(tmp_path, params, param):
    async with (
        stored_gateway(FakeRouter(saying("hello")), tmp_path, runs=False) as gateway,
        gateway.http() as http,
    ):
        reply = await http.get("/v1/usage", params=params)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("bound", ["MAX_SESSIONS", "MAX_UNWRITTEN"])
async def test_sessions_in_memory_are_bounded(tmp_path, monkeypatch, bound):
    monkeypatch.setattr(f"pdserve.gateway.metrics.usage_log.{bound}", 3)
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    await database.start()
    usage = UsageLog(database)
    for number in range(10):
        caller = Caller("r", session=f"s{number}", tenant=Tenant("k", b"12345678", b""))
        usage.count(caller, "tiny", RequestUsage(1, 0, 1))
    await usage.flush()
    now = int(time.time())
    query = UsageQuery(now - DAY, now + DAY, DAY, (UsageRow.session.key,))
    rows = await usage.report(b"12345678".hex(), query, 100)
    await database.close()
    counted: dict[str, int] = {}
    for row in rows:
        counted[row.session] = counted.get(row.session, 0) + row.requests
    assert counted == {"s0": 1, "s1": 1, "s2": 1, "": 7}


async def test_counts_survive_an_unavailable_database(tmp_path, monkeypatch):
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    usage = UsageLog(database)
    usage.count(Caller("r"), "tiny", RequestUsage(10, 4, 3))
    with pytest.raises(Exception, match="is unavailable"):  # its tables do not exist
        await usage.flush()
    usage.count(Caller("r"), "tiny", RequestUsage(10, 4, 3))
    await database.start()
    await usage.flush()
    rows = await usage.report("", UsageQuery(0, 1 << 40, DAY), 10)
    await database.close()
    assert [(row.requests, row.cached_tokens) for row in rows] == [(2, 8)]


async def test_a_large_page_does_not_block_the_loop():
    row = dict.fromkeys(COUNTS, 1) | {"bucket": 0, "session": "s"}

    class Found:
        async def report(self, *request):
            return [SimpleNamespace(**row)] * 20 * AT_ONCE

    passes = 0

    async def count():
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    page = await usage_page(Found(), "", UsageQuery(0, DAY, DAY, ("session",)), DAY)
    counting.cancel()
    (bucket,) = json.loads(page.text())["data"]
    assert len(bucket["results"]) == 20 * AT_ONCE
    assert passes >= 20
