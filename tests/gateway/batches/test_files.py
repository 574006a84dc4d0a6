"""/v1/files: with the openai client, and with malformed forms."""

import asyncio

import openai
import pytest
from fakes.router import FakeRouter, saying
from systems.eventually import eventually
from systems.stored_gateway import CHAT, lines_of, start_batch, stored_gateway

from pdserve.gateway.batches.files import now_us
from pdserve.gateway.openai.stored import routes as stored_routes
from pdserve.services.common.rate_limits import RateLimits, RateSettings

pytestmark = pytest.mark.anyio
BOUNDARY = "----a-boundary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def router() -> FakeRouter:
    return FakeRouter(saying("hello"))


def form(*parts: tuple[str, bytes]) -> bytes:
    """A form of (content-disposition, data) parts."""
    body = b""
    for head, data in parts:
        body += f"--{BOUNDARY}\r\ncontent-disposition: {head}\r\n\r\n".encode() + data + b"\r\n"
    return body + f"--{BOUNDARY}--\r\n".encode()


PURPOSE = ('form-data; name="purpose"', b"batch")
FILE = ('form-data; name="file"; filename="in.jsonl"', b"{}\n")


async def test_a_file_is_returned_unchanged(tmp_path):
    """Upload several pieces that contain every byte value."""
    data = bytes(range(256)) * 3000
    async with stored_gateway(router(), tmp_path) as gateway:
        client = gateway.client()
        file = await client.files.create(file=("some.jsonl", data), purpose="batch")
        assert (file.filename, file.bytes, file.purpose) == ("some.jsonl", len(data), "batch")
        assert (file.object, file.status) == ("file", "processed")
        assert await client.files.retrieve(file.id) == file
        assert (await client.files.content(file.id)).content == data
        assert (await client.files.delete(file.id)).deleted
        for call in (client.files.retrieve(file.id), client.files.delete(file.id)):
            with pytest.raises(openai.NotFoundError) as caught:
                await call
            assert caught.value.body["param"] == "id"  # type: ignore[index]
        assert (await client.files.list()).data == []


async def test_files_batches_and_usage_count_in_the_rate_limit(tmp_path):
    rates = RateLimits(RateSettings(requests=3))
    async with stored_gateway(router(), tmp_path, rates=rates) as gateway:
        client = gateway.client()
        listed = await client.files.with_raw_response.list()
        assert listed.headers["x-ratelimit-remaining-requests"] == "2"
        await client.batches.list()
        await client.get("/usage", cast_to=object, options={"params": {"start_time": 0}})
        for call in (client.files.list(), client.batches.list()):
            with pytest.raises(openai.RateLimitError):
                await call


async def test_files_are_listed_by_pages(tmp_path):
    async with stored_gateway(router(), tmp_path) as gateway:
        client = gateway.client()
        made = [
            (await client.files.create(file=(f"{n}.jsonl", b"{}"), purpose="batch")).id
            for n in range(5)
        ]
        assert [file.id async for file in client.files.list(limit=2)] == made[::-1]
        assert [file.id async for file in client.files.list(limit=2, order="asc")] == made
        first = await client.files.list(limit=3, order="asc")
        assert ([file.id for file in first.data], first.has_more) == (made[:3], True)
        after = await client.files.list(after=made[2], order="asc")
        assert ([file.id for file in after.data], after.has_more) == (made[3:], False)
        assert (await client.files.list(purpose="batch_output")).data == []
        for wrong in ({"limit": 0}, {"limit": 1001}, {"order": "up"}, {"after": "file-none"}):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.files.list(**wrong)
            assert caught.value.param == next(iter(wrong))


async def test_keys_see_only_their_files(tmp_path):
    async with stored_gateway(router(), tmp_path, ("first", "second")) as gateway:
        mine, other = gateway.client("first"), gateway.client("second")
        file = await mine.files.create(file=b"{}", purpose="batch")
        assert [found.id for found in (await mine.files.list()).data] == [file.id]
        assert (await other.files.list()).data == []
        with pytest.raises(openai.BadRequestError):
            await other.files.list(after=file.id)
        for call in (
            other.files.retrieve(file.id),
            other.files.content(file.id),
            other.files.delete(file.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call


async def test_a_file_of_an_open_batch_cannot_be_deleted(tmp_path):
    async with stored_gateway(router(), tmp_path, runs=False) as gateway:
        client = gateway.client()
        batch = await client.batches.retrieve(await start_batch(client, lines_of(1)))
        with pytest.raises(openai.BadRequestError, match=batch.id):
            await client.files.delete(batch.input_file_id)


async def test_another_purpose_is_refused_by_name(tmp_path):
    async with stored_gateway(router(), tmp_path) as gateway:
        client = gateway.client()
        with pytest.raises(openai.BadRequestError, match="'fine-tune'") as caught:
            await client.files.create(file=b"{}", purpose="fine-tune")
        assert caught.value.param == "purpose"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.files.create(
                file=b"{}", purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 3600},
            )  # fmt: skip
        assert str(caught.value.param).startswith("expires_after")
        assert (await client.files.list()).data == []


async def test_bounds_of_files(tmp_path):
    bounds = {"max_file_bytes": 300_000, "max_files_bytes": 500_000, "max_files": 3}
    keys = ("first", "second")
    async with stored_gateway(router(), tmp_path, keys, **bounds) as gateway:
        client = gateway.client("first")
        with pytest.raises(openai.APIStatusError, match="larger than 300000 bytes") as caught:
            await client.files.create(file=b"x" * 300_001, purpose="batch")
        assert caught.value.status_code == 413
        kept = await client.files.create(file=b"x" * 300_000, purpose="batch")
        with pytest.raises(openai.BadRequestError, match="500000 bytes in total"):
            await client.files.create(file=b"x" * 300_000, purpose="batch")
        for _ in range(2):
            await client.files.create(file=b"x", purpose="batch")
        with pytest.raises(openai.BadRequestError, match="you have 3 files"):
            await client.files.create(file=b"x", purpose="batch")
        await gateway.client("second").files.create(file=b"x" * 300_000, purpose="batch")
        await client.files.delete(kept.id)
        await client.files.create(file=b"x" * 300_000, purpose="batch")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (form(FILE), "purpose is required"),
        (form(PURPOSE), "file is required"),
        (form(PURPOSE, FILE, FILE), "occurs more than once"),
        (form(PURPOSE, ('form-data; name="other"', b"x"), FILE), "'other' is not supported"),
        (form(("form-data", b"x")), "has no name"),
        (form(('form-data; name="purpose"', b"x" * 5000)), "longer than 4096 bytes"),
        (
            form((f'form-data; name="{"x" * 3000}"', b"x")),
            "headers of a form part are longer than 2048 bytes",
        ),
        (form(*((f'form-data; name="{n}"', b"") for n in range(20))), "more than 16 fields"),
        (form(PURPOSE, FILE)[:-20], "form is incomplete"),
        (b"this is no form", "not a valid multipart form"),
        (b"", "form is incomplete"),
    ],
)
async def test_malformed_forms(tmp_path, body, why):
    async with stored_gateway(router(), tmp_path) as gateway, gateway.http() as http:
        reply = await http.post("/v1/files", content=body, headers=FORM)
        assert reply.status_code == 400, reply.text
        assert why in reply.json()["error"]["message"]
        assert (await http.get("/v1/files")).json()["data"] == []
        assert (await http.get("/health")).status_code == 200


async def test_the_purpose_may_follow_the_file(tmp_path):
    async with stored_gateway(router(), tmp_path) as gateway, gateway.http() as http:
        reply = await http.post("/v1/files", content=form(FILE, PURPOSE), headers=FORM)
        assert reply.json()["filename"] == "in.jsonl"
        odd = ('form-data; name="file"; filename="a\x01\xffb"', b"{}")
        reply = await http.post("/v1/files", content=form(odd, PURPOSE), headers=FORM)
        assert reply.json()["filename"] == "a?ÿb"
        for headers in ({"content-type": "application/json"}, {}):
            reply = await http.post("/v1/files", content=b"{}", headers=headers)
            assert reply.status_code == 415


async def test_an_aborted_upload_leaves_nothing(tmp_path):
    async with stored_gateway(router(), tmp_path, max_files=1) as gateway, gateway.http() as http:
        sent = asyncio.Event()

        async def slowly():
            yield form(FILE)[:-40] + b"x" * 400_000
            sent.set()
            await asyncio.Event().wait()

        upload = asyncio.create_task(http.post("/v1/files", content=slowly(), headers=FORM))
        await sent.wait()
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)

        async def uploaded() -> bool:
            reply = await http.post("/v1/files", content=form(PURPOSE, FILE), headers=FORM)
            return reply.status_code == 200

        await eventually(uploaded)  # its slot is free


async def test_an_upload_of_a_dead_gateway_is_removed(tmp_path, monkeypatch):
    async with stored_gateway(router(), tmp_path, runs=False, max_files=1) as gateway:
        files = gateway.stored.routes.files
        stopped = await files.begin("")
        await files.append("", stopped, 0, b"x")
        await files.remove_stopped()
        with pytest.raises(openai.BadRequestError, match="you have 1 files"):
            await gateway.client().files.create(file=b"{}", purpose="batch")
        hour_later = now_us() + 3600 * 1_000_000
        with monkeypatch.context() as ahead:  # the clock of another host
            ahead.setattr("pdserve.gateway.batches.files.now_us", lambda: hour_later)
            await files.remove_stopped()
        await files.append("", stopped, 1, b"x")
        monkeypatch.setattr("pdserve.gateway.batches.files.STOPPED_S", 0.0)
        await files.remove_stopped()
        assert (await gateway.client().files.create(file=b"{}", purpose="batch")).bytes == 2
        assert [piece async for piece in files.pieces(stopped)] == []


async def test_a_file_is_read_in_pieces(tmp_path):
    """Read in pieces, also if a client disconnects in the middle."""
    async with stored_gateway(router(), tmp_path) as gateway, gateway.http() as http:
        file = await gateway.client().files.create(file=b"x" * 30_000_000, purpose="batch")
        taken = 0
        async for piece in gateway.stored.routes.files.pieces(file.id):
            assert len(piece) <= 1 << 20
            taken += len(piece)
        assert taken == 30_000_000
        async with http.stream("GET", f"/v1/files/{file.id}/content") as reply:
            assert reply.headers["content-length"] == "30000000"
            async for _ in reply.aiter_bytes(1000):
                break
        assert (await http.get("/health")).status_code == 200


async def test_concurrent_downloads_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_routes, "MAX_DOWNLOADS", 1)
    async with stored_gateway(router(), tmp_path) as gateway, gateway.http() as http:
        file = await gateway.client().files.create(file=b"x" * 30_000_000, purpose="batch")
        content = f"/v1/files/{file.id}/content"
        async with http.stream("GET", content) as first:
            assert first.status_code == 200
            second = await http.get(content)
            assert second.status_code in (429, 503)
            assert "too many downloads" in second.json()["error"]["message"]

        async def is_free() -> bool:
            async with http.stream("GET", content) as again:
                return again.status_code == 200

        await eventually(is_free)


async def test_without_a_database_the_error_says_so(make_http):
    http = make_http(saying("hello"))
    for method, path in [
        ("POST", "/v1/files"), ("GET", "/v1/files"), ("DELETE", "/v1/files/file-1"),
        ("GET", "/v1/files/file-1/content"), ("POST", "/v1/batches"),
        ("POST", "/v1/batches/batch_1/cancel"), ("GET", "/v1/usage"),
    ]:  # fmt: skip
        reply = await http.request(method, path)
        assert reply.status_code == 400
        assert "require --database-url" in reply.json()["error"]["message"]


async def test_a_database_failure_is_a_server_error(tmp_path):
    async with stored_gateway(router(), tmp_path, runs=False) as gateway, gateway.http() as http:
        await start_batch(gateway.client(), lines_of(1))
        for path in tmp_path.glob("gateway.db*"):
            path.unlink()
        await gateway.stored.close()
        (tmp_path / "gateway.db").write_bytes(b"no database" * 1000)
        for path in ("/v1/files", "/v1/batches", "/v1/usage"):
            reply = await http.get(path)
            assert reply.status_code == 503, reply.text
            assert reply.json()["error"]["message"] == "the server's database is unavailable"
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        assert (await http.post(CHAT, json=body)).status_code == 200
        (tmp_path / "gateway.db").unlink()
