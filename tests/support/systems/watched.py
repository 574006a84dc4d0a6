"""A small system whose processes are objects of this one, and their pages of /metrics.

The router is real, and so are engines and the gateway's service; workers have no engine, and
models are tiny.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fakes.router_workers import FakeDecode, FakePrefill, FakeWorker
from fakes.scripted_service import scripted_service
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from pdserve.engine.engine import Engine
from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.app import create_app, create_routes
from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.openai import OpenAiApi
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.router_client import RouterClient
from pdserve.protos import common_pb2 as pb
from pdserve.protos.fleet_pb2 import Load, WorkerHello, WorkerReport
from pdserve.services.common.metrics import ProcessFacts
from pdserve.services.common.tenants import ApiKeys
from pdserve.services.router.core import RouterCore
from pdserve.services.router.main import RouterProcess
from pdserve.services.router.metrics import RouterMetrics
from pdserve.services.router.settings import RouterSettings
from pdserve.services.worker.metrics import WorkerMetrics
from pdserve.services.worker.runtime import load_of
from systems.cluster_secret import ACCESS, SECRET
from systems.eventually import eventually

LIMITS = HttpLimits(1 << 16, 1 << 18, 5.0, 1 << 16, 5.0)
THRESHOLD = 32  # prompt tokens from which a prefill worker computes them


def page_of(*collectors: Collector, certificates: Mapping[str, str] | None = None) -> str:
    """Return a page as a metrics port would show it, with the facts of the process."""
    registry = CollectorRegistry()
    for collector in (*collectors, ProcessFacts(certificates or {})):
        registry.register(collector)
    return generate_latest(registry).decode()


def router_page(core: RouterCore) -> str:
    return page_of(RouterMetrics(core))


def worker_page(load: Load) -> str:
    """Return the page of a decode worker with that load."""
    metrics = WorkerMetrics(WorkerHello(address="decode:1", card=pb.ModelCard(name="tiny")))
    metrics.load = load
    return page_of(metrics)


def engine_load(engine: Engine) -> Load:
    """Return the load that a worker would report of its engine now."""
    return load_of(engine.stats(), {}, {}, 0)


class WatchedRouter:
    """A router with a prefill and a decode worker, and a gateway's connection to it."""

    def __init__(self, router: RouterProcess, client: RouterClient) -> None:
        self.core = router.core
        self._address = router.address
        self._client = client
        self._workers: list[FakeWorker] = []
        self._number = itertools.count()

    async def add(self, worker: FakeWorker) -> None:
        """Add a worker; returns when the router can send it commands."""
        await worker.start(self._address)
        self._workers.append(worker)

        def connected() -> bool:
            known = self.core.fleet.get(worker.incarnation)
            return known is not None and known.connected

        await eventually(connected)

    async def ask(self, count: int = 1, tokens: int = 2 * THRESHOLD) -> None:
        """Run requests to their ends, of any kind, one after another."""
        for _ in range(count):
            number = next(self._number)
            start = pb.Start(
                request=f"r{number}",
                model="tiny",
                prompt_ids=[number] * tokens,
                remaining_ms=60_000,
                queue_remaining_ms=60_000,
                params=pb.SamplingParams(n=1, max_tokens=2),
            )
            async for _ in self._client.open(start):
                pass

    def report(self, worker: FakeWorker, load: Load) -> None:
        """Report a load as if the worker had sent it."""
        known = self.core.fleet.get(worker.incarnation)
        assert known is not None
        self.core.report(known, WorkerReport(load=load), known.lease)

    async def close(self) -> None:
        for worker in self._workers:
            await worker.kill()


@asynccontextmanager
async def watched_router() -> AsyncIterator[tuple[WatchedRouter, FakeDecode, FakePrefill]]:
    """Yield it with its two workers, when one prompt has been handed off."""
    settings = RouterSettings(cluster_secret=(SECRET,), remote_prefill_threshold=THRESHOLD)
    router = RouterProcess(settings)
    await router.start()
    client = RouterClient([router.address], ACCESS, b"g" * 16)
    await client.start()
    made, decode = WatchedRouter(router, client), FakeDecode()
    prefill = FakePrefill([decode])
    try:
        for worker in (decode, prefill):
            await made.add(worker)
        await eventually(lambda: client.num_connected)
        await made.ask()
        yield made, decode, prefill
    finally:
        await client.close()
        await made.close()
        await router.stop(0)


Prompt = str | list[int]


class WatchedGateway:
    """A client of a gateway's HTTP API, and its page."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, count: int, prompt: Prompt = "hello", max_tokens: int = 16) -> list[int]:
        """Return the codes of this many concurrent answers."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens}
        request = (self._http.post("/v1/completions", json=body) for _ in range(count))
        return [answer.status_code for answer in await asyncio.gather(*request)]

    async def page(self, **query: str) -> str:
        return (await self._http.get("/metrics", params=query)).raise_for_status().text


@asynccontextmanager
async def watched_gateway(
    router: Any,
    limits: AdmissionLimits | None = None,
    clock: Callable[[], float] | None = None,
) -> AsyncIterator[WatchedGateway]:
    """Run the gateway of a cluster, over an Upstream."""
    service = scripted_service(router, limits, clock=clock)
    openai = OpenAiApi(service, LIMITS, BodyReader(LIMITS))
    readiness = Readiness(router, service.catalog)
    routes = create_routes([openai], service, readiness, fleet_metrics=False)
    app = create_app([openai], service, readiness, ApiKeys(()), routes=routes)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield WatchedGateway(http)
