"""PostgreSQL text cannot contain NUL, so NUL is refused alike on every database."""

import pytest
from fakes.router import FakeRouter, saying
from systems.stored_gateway import CHAT, lines_of, stored_gateway

pytestmark = pytest.mark.anyio


async def test_an_id_with_nul_is_unknown(tmp_path):
    async with (
        stored_gateway(FakeRouter(saying("hello")), tmp_path, runs=False) as gateway,
        gateway.http() as http,
    ):
        for method, path in [
            ("GET", "/v1/files/file-%00"),
            ("GET", "/v1/files/file-%00/content"),
            ("DELETE", "/v1/files/file-%00"),
            ("GET", "/v1/batches/batch_%00"),
            ("POST", "/v1/batches/batch_%00/cancel"),
            ("GET", "/v1/responses/resp_%00"),
            ("DELETE", "/v1/responses/resp_%00"),
        ]:
            reply = await http.request(method, path)
            assert reply.status_code == 404, f"{method} {path}: {reply.text}"


async def test_other_texts_with_nul_are_refused_by_name(tmp_path):
    async with (
        stored_gateway(FakeRouter(saying("hello")), tmp_path, runs=False) as gateway,
        gateway.http() as http,
    ):
        file = await gateway.client().files.create(file=lines_of(1), purpose="batch")
        batch = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        for path, query in [
            ("/v1/files", {"after": "file-\0"}),
            ("/v1/batches", {"after": "batch_\0"}),
            ("/v1/files", {"purpose": "batch\0"}),
            ("/v1/usage", {"models": "tiny\0"}),
            ("/v1/usage", {"session_ids": "a\0"}),
        ]:
            reply = await http.get(path, params=query)
            assert reply.status_code == 400, f"{path} {query}: {reply.text}"
            assert reply.json()["error"]["param"] == next(iter(query))
        for path, body, param in [
            ("/v1/batches", {**batch, "input_file_id": "file-\0"}, "input_file_id"),
            ("/v1/batches", {**batch, "endpoint": CHAT + "\0"}, "endpoint"),
            ("/v1/batches", {**batch, "metadata": {"a": "\0"}}, "metadata"),
            ("/v1/batches", {**batch, "metadata": {"\0": "a"}}, "metadata"),
            (
                "/v1/responses",
                {"model": "tiny", "input": "hi", "previous_response_id": "resp_\0"},
                "previous_response_id",
            ),
        ]:
            reply = await http.post(path, json=body)
            assert reply.status_code == 400, f"{path} {body}: {reply.text}"
            assert reply.json()["error"]["param"] == param


async def test_a_name_with_nul_is_never_looked_up(tmp_path, monkeypatch):
    """Skip the query, because on PostgreSQL the statement itself would fail."""
    async with stored_gateway(FakeRouter(saying("hello")), tmp_path, runs=False) as gateway:
        store, files = gateway.stored.responses, gateway.stored.routes.files
        batches = gateway.stored.routes.batches
        await gateway.stored.close()  # any lookup would fail
        for path in tmp_path.glob("gateway.db*"):
            path.unlink()
        (tmp_path / "gateway.db").write_bytes(b"no database" * 1000)
        assert await store.find(b"", "a\0") is None
        assert not await store.remove(b"", "a\0")
        assert await files.find("", "a\0") is None
        assert not await files.delete("", "a\0")
        assert await batches.find("", "a\0") is None
        assert await batches.cancel("", "a\0") is None
        (tmp_path / "gateway.db").unlink()
