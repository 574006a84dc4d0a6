"""Each API shapes the errors of its paths and frames its streams."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import httpx
import pytest
from fakes.router import FakeRouter, saying
from fastapi import Request
from pydantic import BaseModel

from pdserve.gateway.http.api import HttpError, HttpLimits
from pdserve.gateway.http.app import create_app
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.responses import EventStream, Reply
from pdserve.gateway.openai import OpenAiApi
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.service import Service
from pdserve.protos import common_pb2 as pb
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.tenants import ApiKeys

pytestmark = pytest.mark.anyio
JSON = {"content-type": "application/json"}
LIMITS = HttpLimits(
    max_body_bytes=64, max_bodies_bytes=640, body_timeout_s=0.5, max_buffer_bytes=1 << 16, stall_s=1
)


class Wrong(BaseModel):
    wrong: str
    because: str


class Lines:
    """An API with line streams and a special error shape."""

    paths = ("/lines",)
    not_offered = ()
    statuses: ClassVar = {503: 529}
    request_id_header = "x-request-id"
    error_model = Wrong

    def add_routes(self, app: Any) -> None:
        @app.post("/lines")
        async def lines(request: Request) -> Any:
            body = await BodyReader(LIMITS).read(request, dict)
            return EventStream(self._count(body["count"], body["fails"]), self, LIMITS)

        @app.post("/lines/whole")
        async def whole(request: Request) -> Any:
            async def work() -> dict[str, Any]:
                raise ServiceError(pb.OVERLOADED, "later", retry_after_s=2.0)

            return Reply(work(), self)

    async def _count(self, count: int, fails: bool) -> AsyncIterator[bytes]:
        for number in range(count):
            yield b"%d\n" % number
            await asyncio.sleep(0)
        if fails:
            raise ServiceError(pb.UNAVAILABLE, "no more numbers")

    def error_object(self, error: HttpError) -> dict[str, Any]:
        return {"wrong": error.code, "because": error.message}

    def error_event(self, error: HttpError) -> bytes:
        return b"! " + error.message.encode() + b"\n"


@pytest.fixture
async def client(make_service: Callable[..., Service], anyio_backend: str) -> Any:
    router = FakeRouter(saying("x"))
    service = make_service(router)
    apis = [Lines(), OpenAiApi(service, LIMITS, BodyReader(LIMITS))]
    app = create_app(apis, service, Readiness(router, service.catalog), ApiKeys(["k"]))
    headers = {"authorization": "Bearer k"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://gateway", headers=headers
    ) as client:
        yield client


async def test_a_stream_is_framed_by_its_dialect(client: httpx.AsyncClient) -> None:
    reply = await client.post("/lines", json={"count": 3, "fails": False})
    assert reply.content == b"0\n1\n2\n"
    reply = await client.post("/lines", json={"count": 2, "fails": True})
    assert (reply.status_code, reply.content) == (200, b"0\n1\n! no more numbers\n")


async def test_errors_have_the_shape_of_the_dialect_of_their_path(
    client: httpx.AsyncClient,
) -> None:
    before_any_event = await client.post("/lines", json={"count": 0, "fails": True})
    assert before_any_event.status_code == 529, "the API must map 503 to 529"
    assert before_any_event.json() == {"wrong": "unavailable", "because": "no more numbers"}
    later = await client.post("/lines/whole")
    assert (later.status_code, later.headers["retry-after"]) == (429, "2")
    assert later.json() == {"wrong": "overloaded", "because": "later"}
    for reply, status, code in (
        (await client.post("/lines", content=b"x" * 100, headers=JSON), 413, ""),
        (await client.post("/lines", content=b"[", headers=JSON), 400, "invalid_argument"),
        (await client.get("/lines"), 405, "method_not_allowed"),
        (await client.get("/lines/nothing"), 404, "unknown_url"),
        (await client.post("/lines", headers={"authorization": ""}), 401, "unauthenticated"),
    ):
        assert reply.status_code == status
        assert reply.json()["wrong"] == code


@pytest.mark.parametrize("path", ["/v1/nothing", "/nothing"])
async def test_the_last_dialect_handles_all_other_paths(
    client: httpx.AsyncClient, path: str
) -> None:
    assert (await client.get(path)).json()["error"]["code"] == "unknown_url"
