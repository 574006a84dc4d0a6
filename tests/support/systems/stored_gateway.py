"""A gateway with a database, over a scripted router: the parts of a real one, on a socket."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from fakes.router import Event, FakeRouter, Play, saying
from fakes.scripted_service import scripted_service

from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.app import create_app, create_routes
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.serving import HttpServer
from pdserve.gateway.listener import listen
from pdserve.gateway.openai import OpenAiApi
from pdserve.gateway.openai.stored.parts import StoredParts
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.settings import GatewaySettings
from pdserve.protos import common_pb2 as pb
from pdserve.services.common.rate_limits import RateLimits
from pdserve.services.common.tenants import ApiKeys
from systems.eventually import LIMIT_S, eventually

CHAT = "/v1/chat/completions"
BOUNDS = HttpLimits(
    max_body_bytes=1 << 20,
    max_bodies_bytes=1 << 24,
    body_timeout_s=10.0,
    max_buffer_bytes=1 << 16,
    stall_s=10.0,
)


@dataclass
class StoredGateway:
    """A gateway; `stored` are its parts; its clients are closed with it."""

    url: str
    limits: AdmissionLimits
    stored: StoredParts
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(api_key=key, base_url=f"{self.url}/v1", max_retries=0)
        self.clients.append(client)
        return client

    def http(self, key: str = "none") -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60)


async def change(folder: Path, statement: str, *values: object) -> None:
    """Run a statement in the database of `stored_gateway` as another process would: in a thread,
    since the event loop ends a transaction that the gateway has open.
    """

    def execute() -> None:
        with closing(sqlite3.connect(folder / "gateway.db", timeout=LIMIT_S)) as database, database:
            database.execute(statement, values)

    await asyncio.to_thread(execute)


@asynccontextmanager
async def stored_gateway(
    router: FakeRouter,
    folder: Path,
    keys: Sequence[str] = (),
    limits: AdmissionLimits | None = None,
    runs: bool = True,
    rates: RateLimits | None = None,
    **settings: Any,
) -> AsyncIterator[StoredGateway]:
    """Run a gateway. Its database is in `folder` unless `settings` have another. Without `runs` it
    runs no batch, and writes no usage.
    """
    made = GatewaySettings(**{"database_url": f"sqlite:///{folder}/gateway.db", **settings})
    accepted = ApiKeys(keys)
    limits = limits or AdmissionLimits(64, 32)
    stored = StoredParts(made, accepted, limits)
    service = scripted_service(router, limits, rates=rates, count_usage=stored.usage.count)
    bodies = BodyReader(BOUNDS)
    api = OpenAiApi(service, BOUNDS, bodies, stored.responses, stored.routes)
    readiness = Readiness(router, service.catalog)
    routes = create_routes([api], service, readiness)
    app = create_app([api], service, readiness, accepted, routes=routes)
    listener = listen("127.0.0.1", 0)
    http = HttpServer(app, api, BOUNDS.stall_s)
    await stored.start()
    tasks = [asyncio.create_task(http.serve([listener]))]
    if runs:
        tasks.append(asyncio.create_task(stored.run(routes)))
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        gateway = StoredGateway(url, limits, stored)
        try:
            yield gateway
        finally:
            for client in gateway.clients:
                await client.close()
    finally:
        for task in tasks[1:]:
            task.cancel()
        http.should_exit = True
        http.config.timeout_graceful_shutdown = 1
        await asyncio.gather(*tasks, return_exceptions=True)
        await stored.close()


def all_take_part(count: int) -> list[FakeRouter]:
    """Return `count` routers, which answer only once each has received a request."""
    request: set[int] = set()
    everybody = asyncio.Event()

    async def play(router: FakeRouter, start: Any) -> AsyncGenerator[Any, None]:
        request.add(id(router))
        if len(request) == count:
            everybody.set()
        await everybody.wait()
        async for event in saying("hello", cached=1)(router, start):
            yield event

    return [FakeRouter(play) for _ in range(count)]


def holding_after(count: int, hold: asyncio.Event) -> Play:
    """Return a script that answers "hello"; requests after the first `count` wait for `hold`."""

    async def play(router: FakeRouter, start: pb.Start) -> AsyncGenerator[Event, None]:
        if len(router.starts) > count:
            await hold.wait()
        async for event in saying("hello")(router, start):
            yield event

    return play


def lines_of(count: int, url: str = CHAT, **body: Any) -> bytes:
    """Return a batch of this many requests, from request-0 on; each contains its number."""
    return b"".join(
        json.dumps(
            {
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": url,
                "body": {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": f"number {number}"}],
                    **body,
                },
            }
        ).encode()
        + b"\n"
        for number in range(count)
    )


async def start_batch(client: openai.AsyncOpenAI, data: bytes, url: Any = CHAT) -> str:
    """Start a new batch; return its id."""
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h"
    )
    assert batch.status == "validating"
    return batch.id


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    """Return the batch, once it has ended."""

    async def found() -> Any:
        batch = await client.batches.retrieve(batch_id)
        return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None

    return await eventually(found)


async def content_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of an output or error file."""
    if file_id is None:
        return []
    text = (await client.files.content(file_id)).text
    return [json.loads(line) for line in text.splitlines()]
