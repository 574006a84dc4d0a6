"""Limits on bodies and concurrent requests: a request beyond one is refused and its resources are
freed."""

import asyncio
import json

import pytest
from fakes.router import FakeRouter, saying
from oracles.http_errors import CHAT, HI, JSON, PLAIN, WIDE, check
from systems.eventually import eventually

from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.http.api import HttpLimits

pytestmark = pytest.mark.anyio


async def test_body_too_large(make_http):
    client = make_http(saying("x"))
    check(await client.post(CHAT, content=b"x" * 70_000, headers=JSON), 413)

    async def chunks():
        for _ in range(10):
            yield b"x" * 10_000

    check(await client.post(CHAT, content=chunks(), headers=JSON), 413)


async def test_a_body_counts_until_it_is_answered(make_http):
    """Hold two unanswered bodies of 60 KB against a limit of 128 KiB."""
    go_on = asyncio.Event()

    async def waits(router, start):
        await go_on.wait()
        async for event in saying("x")(router, start):
            yield event

    router = FakeRouter(waits)
    narrow = HttpLimits(1 << 16, 160 << 10, 60, max_buffer_bytes=1 << 16, stall_s=60)
    client = make_http(router, bounds=narrow)
    body = {"model": "tiny", "prompt": list(range(100)) * 2, "max_tokens": 1, "user": "x" * 60_000}
    held = [asyncio.create_task(client.post(PLAIN, json=body)) for _ in range(2)]
    await eventually(lambda: len(router.starts) == 2)
    assert (await client.post(PLAIN, json=body)).status_code == 429
    go_on.set()
    assert [reply.status_code for reply in await asyncio.gather(*held)] == [200, 200]
    assert (await client.post(PLAIN, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"stop_token_ids": ["a"] * 200}, "stop_token_ids: at most 128 entries, not 200"),
        ({"logit_bias": {str(i): "a" for i in range(1100)}}, "logit_bias: at most 1024 entries"),
        ({str(i): 0 for i in range(1100)}, "the body has 1102 fields; the limit is 1024"),
    ],
    ids=["ids", "biases", "fields"],
)
async def test_a_list_with_too_many_entries_is_refused_unread(make_http, more, said):
    """Refuse by length: one error per entry would block the loop for a second at half a million."""
    client = make_http(saying("x"), bounds=WIDE)
    reply = await client.post(PLAIN, json={"model": "tiny", "prompt": "a", **more})
    assert reply.status_code == 400
    assert said in reply.text


async def test_bodies_share_a_limit_and_each_key_has_a_share(make_http):
    """Under a limit of 256 KiB, a flood of unfinished bodies leaves half of it to another key."""
    client = make_http(saying("x"), keys=("flood", "other"), bounds=WIDE)
    go_on, begun = asyncio.Event(), 0

    async def unfinished():
        nonlocal begun
        yield b'{"model": "tiny", "messages": "' + b"x" * 60_000
        begun += 1
        await go_on.wait()
        yield b'"}'

    def post(key, content):
        headers = {**JSON, "authorization": f"Bearer {key}"}
        return asyncio.create_task(client.post(CHAT, content=content, headers=headers))

    flood = [post("flood", unfinished()) for _ in range(4)]
    await eventually(lambda: begun == 4)
    refused = await post("flood", unfinished())
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    small = await post("flood", json.dumps({"model": "tiny", "messages": HI}).encode())
    assert small.status_code == 200, "22 KB must fit into the share of the other key"
    for _ in range(3):
        large = {"model": "tiny", "messages": [{"role": "user", "content": "hi " * 15_000}]}
        reply = await post("other", json.dumps(large).encode())
        assert reply.status_code != 429
    go_on.set()
    for reply in await asyncio.gather(*flood):
        check(reply, 400, "messages")
    check(
        await post("flood", b'{"model": "tiny", "messages": "' + b"x" * 60_000 + b'"}'),
        400,
        "messages",
    )


async def test_body_too_slow(make_app):
    sent = []

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": CHAT, "raw_path": b"", "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
        "scheme": "http", "server": ("x", 1),
    }  # fmt: skip
    await make_app(FakeRouter(saying("x")))(scope, receive, send)
    assert sent[0]["status"] == 408


@pytest.mark.parametrize(("limits", "words"), [((1, 9), "open"), ((9, 1), "waiting")])
async def test_too_many_concurrent_requests(make_http, limits, words):
    hold = asyncio.Event()

    async def play(router, start):
        await hold.wait()
        async for event in saying("hello")(router, start):
            yield event

    client = make_http(FakeRouter(play), limits=AdmissionLimits(*limits))
    first = asyncio.create_task(client.post(CHAT, json={"model": "tiny", "messages": HI}))
    await asyncio.sleep(0.05)
    reply = await client.post(CHAT, json={"model": "tiny", "messages": HI})
    assert reply.status_code == 429
    error = reply.json()["error"]
    assert error["type"] == "rate_limit_error"
    assert words in error["message"]
    assert int(reply.headers["retry-after"]) >= 1
    hold.set()
    assert (await first).status_code == 200
    assert (await client.post(CHAT, json={"model": "tiny", "messages": HI})).status_code == 200
