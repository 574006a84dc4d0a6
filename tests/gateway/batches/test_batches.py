"""/v1/batches with the openai client: from a file of requests to a file of answers."""

import asyncio
import json

import openai
import pytest
from fakes.router import FakeRouter, failed, placed, saying
from systems.eventually import eventually
from systems.stored_gateway import (
    CHAT,
    content_of,
    ended,
    holding_after,
    lines_of,
    start_batch,
    stored_gateway,
)

from pdserve.gateway.admission import AdmissionLimits
from pdserve.protos import common_pb2 as pb

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]


async def test_a_batch_from_its_file_to_its_answers(tmp_path):
    async with stored_gateway(FakeRouter(saying("hello world", cached=2)), tmp_path) as gateway:
        client = gateway.client()
        file = await client.files.create(file=("in.jsonl", lines_of(20)), purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
            metadata={"what": "a test"},
        )
        assert made.expires_at is not None
        assert 86400 <= made.expires_at - made.created_at <= 86401
        batch = await ended(client, made.id)
        assert batch.status == "completed"
        assert (batch.request_counts.total, batch.request_counts.completed) == (20, 20)
        assert batch.request_counts.failed == 0
        assert batch.metadata == {"what": "a test"}
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        assert batch.error_file_id is None
        lines = await content_of(client, batch.output_file_id)
        assert [line["custom_id"] for line in lines] == [f"request-{n}" for n in range(20)]
        assert len({line["id"] for line in lines}) == 20
        for line in lines:
            assert line["error"] is None
            assert line["response"]["status_code"] == 200
            assert line["response"]["request_id"] in line["response"]["body"]["id"]
            message = line["response"]["body"]["choices"][0]["message"]
            assert message["content"] == "hello world"
        output = await client.files.retrieve(batch.output_file_id)
        assert output.purpose == "batch_output"
        assert output.bytes == len((await client.files.content(output.id)).content)


async def test_refused_lines_are_in_the_error_file(tmp_path):
    good, bad = lines_of(2), lines_of(3, max_tokens=-2)
    data = good + bad.replace(b"request-", b"bad-")
    async with stored_gateway(FakeRouter(saying("hello")), tmp_path) as gateway:
        client = gateway.client()
        batch = await ended(client, await start_batch(client, data))
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (5, 2, 3)
        assert len(await content_of(client, batch.output_file_id)) == 2
        errors = await content_of(client, batch.error_file_id)
        assert [line["custom_id"] for line in errors] == ["bad-0", "bad-1", "bad-2"]
        async with gateway.http() as http:
            body = {"model": "tiny", "messages": HI, "max_tokens": -2}
            live = await http.post(CHAT, json=body)
        assert {json.dumps(line["response"]["body"]) for line in errors} == {
            json.dumps(live.json())
        }
        assert errors[0]["response"]["status_code"] == live.status_code == 400


async def test_completions_too(tmp_path):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    data = json.dumps({**line, "body": {"model": "tiny", "prompt": "hello"}}).encode()
    async with stored_gateway(FakeRouter(saying(" world")), tmp_path) as gateway:
        client = gateway.client()
        batch = await ended(client, await start_batch(client, data, "/v1/completions"))
        (answer,) = await content_of(client, batch.output_file_id)
        assert answer["response"]["body"]["choices"][0]["text"] == " world"


async def test_responses_lines_are_stored_on_request(tmp_path):
    url = "/v1/responses"
    data = b"".join(
        json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": url,
                "body": {"model": "tiny", "input": "hello", **fields},
            }
        ).encode()
        + b"\n"
        for number, fields in enumerate(({}, {"store": False}, {"store": True}))
    )
    async with stored_gateway(FakeRouter(saying(" world")), tmp_path) as gateway:
        client = gateway.client()
        batch = await ended(client, await start_batch(client, data, url))
        answers = [
            line["response"]["body"] for line in await content_of(client, batch.output_file_id)
        ]
        assert [answer["store"] for answer in answers] == [False, False, True]
        async with gateway.http() as http:
            found = [(await http.get(f"{url}/{answer['id']}")).status_code for answer in answers]
        assert found == [404, 404, 200]


ONE = json.loads(lines_of(1))


BAD_FILES = [
    (b"", "empty_file", None, None),
    (b"\n\r\n  \n", "empty_file", None, None),
    (b"{not json}\n", "invalid_json_line", 1, None),
    (b"[1]\n", "invalid_json_line", 1, None),
    (lines_of(1) + b"\xff\xfe\n", "invalid_json_line", 2, None),
    (lines_of(2) + lines_of(1), "duplicate_custom_id", 3, "custom_id"),
    (lines_of(1, "/v1/completions"), "url_mismatch", 1, "url"),
    (lines_of(1, stream=True), "invalid_value", 1, "body.stream"),
    (json.dumps({**ONE, "method": "GET"}).encode(), "invalid_value", 1, "method"),
    (json.dumps({**ONE, "body": None}).encode(), "missing_required_parameter", 1, "body"),
    (json.dumps({**ONE, "body": [1]}).encode(), "invalid_value", 1, "body"),
    (json.dumps({**ONE, "custom_id": 7}).encode(), "invalid_value", 1, "custom_id"),
    (lines_of(1).replace(b'"custom_id"', b'"id"'), "missing_required_parameter", 1, "custom_id"),
    (lines_of(1) + b"x" * 10_000_000 + b"\n" + lines_of(1), "line_too_long", 2, None),
    (b"[" * 100_000, "invalid_json_line", 1, None),
    (b'{"a":[' + b"0," * 600_000 + b"0]}", "invalid_json_line", 1, None),
]  # fmt: skip


async def test_a_bad_file_fails_with_the_line(tmp_path, subtests):
    router = FakeRouter(saying("hello"))
    async with stored_gateway(router, tmp_path) as gateway:
        client = gateway.client()
        for data, code, line, param in BAD_FILES:
            with subtests.test(data=data[:80], code=code):
                batch = await ended(client, await start_batch(client, data))
                assert batch.status == "failed"
                assert batch.failed_at is not None
                found = batch.errors.data[0]
                assert (found.code, found.line, found.param) == (code, line, param)
                assert found.message
                assert batch.output_file_id is batch.error_file_id is None
    assert router.starts == []


OTHER_WAYS = {
    "no newline at the end": lines_of(3)[:-1],
    "CRLF": lines_of(3).replace(b"\n", b"\r\n"),
    "byte order mark": b"\xef\xbb\xbf" + lines_of(3),
    "blank lines": lines_of(2) + b"\n\n" + lines_of(3).splitlines()[2],
}


async def test_other_line_formats(tmp_path, subtests):
    async with stored_gateway(FakeRouter(saying("hello")), tmp_path) as gateway:
        client = gateway.client()
        for name, data in OTHER_WAYS.items():
            with subtests.test(name):
                batch = await ended(client, await start_batch(client, data))
                assert batch.status == "completed"
                lines = await content_of(client, batch.output_file_id)
                ids = [line["custom_id"] for line in lines]
                assert ids == ["request-0", "request-1", "request-2"]


async def test_many_errors_are_reported_up_to_a_bound(tmp_path):
    async with stored_gateway(FakeRouter(saying("hello")), tmp_path) as gateway:
        client = gateway.client()
        batch = await ended(client, await start_batch(client, b"{\n" * 5000))
        assert [error.line for error in batch.errors.data] == list(range(1, 101))


async def test_a_cancelled_batch_keeps_what_was_answered(tmp_path):
    router = FakeRouter(holding_after(5, asyncio.Event()))
    async with stored_gateway(router, tmp_path, batch_concurrency=4) as gateway:
        client = gateway.client()
        batch_id = await start_batch(client, lines_of(30))

        async def stuck() -> bool:
            counts = (await client.batches.retrieve(batch_id)).request_counts
            return counts is not None and counts.completed == 5 and len(router.starts) == 9

        await eventually(stuck)
        assert (await client.batches.cancel(batch_id)).status == "cancelling"
        batch = await ended(client, batch_id)
        assert batch.status == "cancelled"
        assert batch.cancelling_at <= batch.cancelled_at
        done = await content_of(client, batch.output_file_id)
        rest = await content_of(client, batch.error_file_id)
        assert len(done) == batch.request_counts.completed == 5
        ids = [line["custom_id"] for line in (*done, *rest)]
        assert sorted(ids) == sorted(f"request-{n}" for n in range(30))
        assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
        assert all(line["response"] is None for line in rest)
        # running lines were cancelled at the router
        await eventually(lambda: len(router.left) == 4)
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await client.batches.cancel(batch_id)


async def test_overload_is_not_the_result_of_a_line(tmp_path):
    async def play(router, start):
        if len(router.starts) <= 6:
            yield failed(start, pb.OVERLOADED if len(router.starts) % 2 else pb.UNAVAILABLE)
            return
        async for event in saying("hello")(router, start):
            yield event

    router = FakeRouter(play)
    async with stored_gateway(router, tmp_path) as gateway:
        client = gateway.client()
        batch = await ended(client, await start_batch(client, lines_of(6)))
        assert len(router.starts) == 12
        assert (batch.status, batch.request_counts.completed) == ("completed", 6)
        assert batch.error_file_id is None


async def test_lines_leave_room_for_requests(tmp_path):
    """While a request waits for its first token, only one line runs at a time."""
    hold, open_lines, most = asyncio.Event(), 0, 0

    async def play(router, start):
        nonlocal open_lines, most
        text = router.words.decode(list(start.prompt_ids))
        if "number" not in text:
            await hold.wait()
        else:
            open_lines += 1
            if not hold.is_set():
                most = max(most, open_lines)
            await asyncio.sleep(0.01)
            open_lines -= 1
        async for event in saying("hello")(router, start):
            yield event

    limits = AdmissionLimits(1, 1)
    router = FakeRouter(play)
    async with stored_gateway(router, tmp_path, limits=limits) as gateway:
        client = gateway.client()
        live = asyncio.create_task(client.chat.completions.create(model="tiny", messages=HI))
        await eventually(lambda: limits.waiting == 1)
        batch_id = await start_batch(client, lines_of(10))

        async def half() -> bool:
            counts = (await client.batches.retrieve(batch_id)).request_counts
            return counts is not None and counts.completed >= 5

        await eventually(half)
        assert not live.done()
        assert most == 1
        hold.set()
        assert (await live).choices[0].message.content == "hello"
        batch = await ended(client, batch_id)
        assert batch.request_counts.completed == 10
    assert limits.idle.is_set()


async def test_the_end_of_the_window(tmp_path):
    async def play(router, start):
        yield placed(start)
        if router.starts.index(start) >= 3:
            await asyncio.Event().wait()
        async for event in saying("hello")(router, start):
            yield event

    from pdserve.services.common.tenants import EVERYBODY

    router = FakeRouter(play)
    async with stored_gateway(router, tmp_path, batch_concurrency=2) as gateway:
        client = gateway.client()
        file = await client.files.create(file=lines_of(8), purpose="batch")
        routes = gateway.stored.routes
        made = await routes.batches.create(EVERYBODY, CHAT, file.id, "24h", 3, None)
        batch = await ended(client, made.id)
        assert batch.status == "expired"
        assert batch.expired_at >= batch.expires_at
        done = await content_of(client, batch.output_file_id)
        rest = await content_of(client, batch.error_file_id)
        assert len(done) == 3
        assert len(rest) == 5
        assert {line["error"]["code"] for line in rest} == {"batch_expired"}


async def test_invalid_batches_are_refused(tmp_path):
    async with stored_gateway(FakeRouter(saying("hello")), tmp_path, runs=False) as gateway:
        client = gateway.client()
        file = await client.files.create(file=lines_of(1), purpose="batch")
        good = {
            "input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h",
        }  # fmt: skip
        for wrong, param in [
            ({"input_file_id": "file-none"}, "input_file_id"),
            ({"input_file_id": "x" * 1000}, "input_file_id"),
            ({"endpoint": "/v1/images"}, "endpoint"),
            ({"endpoint": "/v1/batches"}, "endpoint"),
            ({"completion_window": "1h"}, "completion_window"),
            ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
            ({"metadata": {"a": 1}}, "metadata.a"),
            ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after"),
        ]:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.batches.create(**{**good, **wrong})
            assert caught.value.param == param
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve("batch_none")


async def test_batches_are_listed_by_pages(tmp_path):
    async with stored_gateway(FakeRouter(saying("hello")), tmp_path, runs=False) as gateway:
        client = gateway.client()
        made = [await start_batch(client, lines_of(1)) for _ in range(5)]
        page = await client.batches.list(limit=2)
        assert [batch.id for batch in page.data] == made[:2:-1]
        assert page.has_more
        assert [batch.id async for batch in client.batches.list(limit=2)] == made[::-1]


async def test_keys_see_only_their_batches(tmp_path):
    keys = ("first", "second")
    async with stored_gateway(FakeRouter(saying("hello")), tmp_path, keys) as gateway:
        mine, other = gateway.client("first"), gateway.client("second")
        batch = await ended(mine, await start_batch(mine, lines_of(2)))
        assert (await other.batches.list()).data == []
        for call in (
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.files.retrieve(batch.output_file_id),
            other.files.content(batch.output_file_id),
            other.files.delete(batch.output_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError, match="does not exist"):
            await other.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            )


async def test_a_batch_of_a_removed_key_waits(tmp_path):
    router = FakeRouter(saying("hello"))
    async with stored_gateway(router, tmp_path, ("first", "second"), runs=False) as gateway:
        client = gateway.client("first")
        batch_id = await start_batch(client, lines_of(2))
    async with stored_gateway(router, tmp_path, ("second",)) as gateway:
        other = gateway.client("second")
        assert (await ended(other, await start_batch(other, lines_of(1)))).status == "completed"
        assert len(router.starts) == 1
    async with stored_gateway(router, tmp_path, ("first",)) as gateway:
        assert (await ended(gateway.client("first"), batch_id)).status == "completed"
