"""The database parts are created while the gateway is serving, and usage before that is kept."""

import asyncio
import sqlite3
from contextlib import closing

import httpx
import pytest
from fakes.router import FakeRouter, saying
from fakes.scripted_service import scripted_service
from systems.eventually import eventually
from systems.stored_gateway import BOUNDS, CHAT

from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.http.app import create_app, create_routes
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.openai import OpenAiApi
from pdserve.gateway.openai.stored import LateParts
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.settings import GatewaySettings
from pdserve.services.common.tenants import ApiKeys

pytestmark = pytest.mark.anyio
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def made(folder):
    """Create (late parts, routes, application)."""
    settings = GatewaySettings(database_url=f"sqlite:///{folder}/gateway.db")
    keys, limits, router = ApiKeys(()), AdmissionLimits(64, 32), FakeRouter(saying("hello"))
    late = LateParts(settings, keys, limits)
    service = scripted_service(router, limits, count_usage=late.count)
    api = OpenAiApi(service, BOUNDS, BodyReader(BOUNDS), late, late)
    readiness = Readiness(router, service.catalog)
    routes = create_routes([api], service, readiness)
    return late, routes, create_app([api], service, readiness, keys, routes=routes)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/responses/resp_x"])
async def test_a_request_creates_the_parts(tmp_path, path):
    late, routes, app = made(tmp_path)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://g", timeout=60) as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 200
        asking = asyncio.create_task(http.get(path))
        await asyncio.sleep(0)
        assert not list(tmp_path.iterdir())
        running = asyncio.create_task(late.run(routes))
        assert (await asking).status_code == (404 if "resp" in path else 200)
        shown = (await http.get("/openapi.json")).json()["paths"]
        assert {"/v1/files", "/v1/batches", "/v1/usage"} <= shown.keys()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await late.close()
    with closing(sqlite3.connect(tmp_path / "gateway.db")) as found:  # includes earlier usage
        assert found.execute("SELECT sum(requests) FROM usage").fetchone() == (1,)


async def test_the_parts_are_created_when_wanted(tmp_path):
    late, routes, _ = made(tmp_path)
    running = asyncio.create_task(late.run(routes))
    await asyncio.sleep(0)
    assert not list(tmp_path.iterdir())
    late.request()
    await eventually(lambda: (tmp_path / "gateway.db").exists())
    await late.parts()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await late.close()


@pytest.mark.parametrize("made_in_time", [True, False])
async def test_pending_usage_is_bounded(tmp_path, monkeypatch, caplog, made_in_time):
    monkeypatch.setattr("pdserve.gateway.openai.stored.late.MAX_EARLY_USAGE", 2)
    late, routes, app = made(tmp_path)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://g", timeout=60) as http:
        for _ in range(5):
            assert (await http.post(CHAT, json=BODY)).status_code == 200
    if made_in_time:
        late.request()
        running = asyncio.create_task(late.run(routes))
        await late.parts()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await late.close()
    assert f"the usage of {3 if made_in_time else 5} requests was not recorded" in caplog.text
    if made_in_time:
        with closing(sqlite3.connect(tmp_path / "gateway.db")) as found:
            assert found.execute("SELECT sum(requests) FROM usage").fetchone() == (2,)


async def test_a_drain_waits_for_the_parts_if_usage_does(tmp_path):
    late, routes, app = made(tmp_path)
    await late.drain()
    assert not list(tmp_path.iterdir())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://g", timeout=60) as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 200
    running = asyncio.create_task(late.run(routes))
    await late.drain()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await late.close()
    with closing(sqlite3.connect(tmp_path / "gateway.db")) as found:
        assert found.execute("SELECT sum(requests) FROM usage").fetchone() == (1,)


async def test_an_invalid_database_file_ends_the_task(tmp_path):
    (tmp_path / "gateway.db").write_text("no database" * 100)
    late, routes, _ = made(tmp_path)
    late.request()
    with pytest.raises(OSError, match="--database-url"):
        await late.run(routes)
