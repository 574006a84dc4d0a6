"""Several routers and gateways, with workers that have no engine: losing a router loses no
request.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from fakes.one_token_worker import OneTokenWorker
from fakes.router_workers import card
from systems.cluster_secret import ACCESS, SECRET
from systems.eventually import eventually

from pdserve.gateway.router_client import RouterClient
from pdserve.gateway.router_client import client as client_module
from pdserve.protos import common_pb2 as pb
from pdserve.services.common import discovery
from pdserve.services.router.main import RouterProcess
from pdserve.services.router.settings import RouterSettings

pytestmark = pytest.mark.anyio
ROUTERS, GATEWAYS, WORKERS, REQUESTS = 4, 3, 2, 600


class System:
    """Routers, workers that join each, and gateways that reach all by one name."""

    def __init__(self) -> None:
        self.routers: list[RouterProcess] = []
        self.gateways: list[RouterClient] = []
        self._stack = AsyncExitStack()

    @property
    def addresses(self) -> list[str]:
        return [router.address for router in self.routers]

    async def add_router(self) -> RouterProcess:
        router = RouterProcess(RouterSettings(cluster_secret=(SECRET,)))
        await router.start()
        self._stack.push_async_callback(router.stop, 0.1)
        self.routers.append(router)
        return router

    async def add_worker(self) -> None:
        worker = OneTokenWorker(["routers:1"], ACCESS, card())
        await worker.start()
        self._stack.push_async_callback(worker.close)

    async def add_gateway(self, number: int) -> None:
        client = RouterClient(["routers:1"], ACCESS, number.to_bytes(16))
        await client.start()
        self._stack.push_async_callback(client.close)
        self.gateways.append(client)

    @staticmethod
    def has_work(router: RouterProcess) -> bool:
        """Return whether a router has ended requests and has others open."""
        dispatcher = router.core.dispatcher
        return dispatcher.num_running > 0 and dispatcher.outcomes["ok"] > 0

    async def ask(self, count: int, width: int = 20) -> None:
        """Send requests through the gateways in turn; some have a common prefix."""
        gate = asyncio.Semaphore(width)

        async def one(number: int) -> None:
            prompt = [number % 50] * 40 + [number % 60_000]
            start = pb.Start(
                request=f"r{number}",
                model="tiny",
                prompt_ids=prompt,
                remaining_ms=60_000,
                queue_remaining_ms=60_000,
                params=pb.SamplingParams(n=1, max_tokens=1),
            )
            async with gate:
                events = [e async for e in self.gateways[number % GATEWAYS].open(start)]
            assert events[-1].HasField("finished"), events[-1]

        await asyncio.gather(*(one(number) for number in range(count)))

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def system(anyio_backend: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[System]:
    made = System()
    monkeypatch.setattr(discovery, "resolve", lambda name: made.addresses)
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.1)
    for _ in range(ROUTERS):
        await made.add_router()
    for _ in range(WORKERS):
        await made.add_worker()
    for number in range(GATEWAYS):
        await made.add_gateway(number)
    await eventually(lambda: all(_ready(r) for r in made.routers))
    await eventually(lambda: all(g.num_connected == ROUTERS for g in made.gateways))
    yield made
    await made.close()


def _ready(router: RouterProcess) -> bool:
    workers = router.core.fleet.workers.values()
    return len(workers) == WORKERS and all(worker.connected for worker in workers)


async def test_a_lost_router_takes_no_request_with_it(system: System) -> None:
    asking = asyncio.create_task(system.ask(REQUESTS))
    busy = await eventually(lambda: [r for r in system.routers if system.has_work(r)])
    gone = busy[0]
    system.routers.remove(gone)
    await gone.stop(0)
    assert not asking.done()
    await asking
