"""Requests of different keys take turns, so a flood of one key does not delay another."""

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fakes.router import saying

from pdserve.gateway.http.guard import Guard
from pdserve.services.common.tenants import ApiKeys

pytestmark = pytest.mark.anyio

DIALECT: Any = Mock(
    paths=("/",), statuses={}, request_id_header="x-request-id", error_object=lambda error: {}
)


class Application:
    """Record the keys of arriving requests; each request computes for a while."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.together: dict[int, int] = {}  # by event-loop pass
        self.passes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.entered.append(scope["headers"][0][1].decode())
        self.together[self.passes] = self.together.get(self.passes, 0) + 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def count(self) -> None:
        while True:
            self.passes += 1
            await asyncio.sleep(0)


def call(guard: Guard, key: str, path: str = "/v1/models") -> "asyncio.Task[None]":
    async def send(message: Any) -> None:
        pass

    scope = {
        "type": "http", "method": "GET", "path": path,
        "headers": [(b"authorization", f"Bearer {key}".encode())],
    }  # fmt: skip
    return asyncio.create_task(guard(scope, send, send))  # type: ignore[arg-type]


async def test_keys_enter_in_turn_and_one_at_a_time(anyio_backend: str) -> None:
    app = Application()
    guard = Guard(app, ApiKeys(("flood", "other")), (), [DIALECT], False, ())
    counting = asyncio.create_task(app.count())
    tasks = [call(guard, "flood") for _ in range(50)] + [call(guard, "other") for _ in range(2)]
    await asyncio.gather(*tasks)
    counting.cancel()
    assert len(app.entered) == 52
    at = [number for number, who in enumerate(app.entered) if who.endswith("other")]
    assert max(at) <= 5
    assert set(app.together.values()) == {1}


async def test_a_probe_does_not_wait_for_other_requests(anyio_backend: str) -> None:
    guard = Guard(app := Application(), ApiKeys(("k",)), ("/health",), [DIALECT], False, ())
    flood = [call(guard, "") for _ in range(50)]
    await call(guard, "", "/health")
    assert len(app.entered) == 1
    assert sum(task.done() for task in flood) < 5
    await asyncio.gather(*flood)


async def test_scrapes_are_spaced_out(make_http: Callable[..., Any]) -> None:
    client: httpx.AsyncClient = make_http(saying("x"))
    began = asyncio.get_running_loop().time()
    pages = await asyncio.gather(*(client.get("/metrics") for _ in range(4)))
    assert [page.status_code for page in pages] == [200] * 4
    assert asyncio.get_running_loop().time() - began >= 4 * 0.1
