"""Several routers and gateways, with workers that only talk: everybody has its share."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from cluster_secret import ACCESS, SECRET
from eventually import eventually
from router_workers import card
from talker import Talker

from pdserve.gateway.router_client import client as client_module
from pdserve.gateway.router_client.client import RouterClient
from pdserve.protos import common_pb2 as pb
from pdserve.services.router.main import RouterProcess
from pdserve.services.router.settings import RouterSettings

pytestmark = pytest.mark.anyio
ROUTERS, GATEWAYS, WORKERS, REQUESTS = 10, 3, 2, 1000


class System:
    """Routers, workers that join each, and gateways that know all by one name."""

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
        talker = Talker(["routers:1"], ACCESS, card())
        await talker.start()
        self._stack.push_async_callback(talker.close)

    async def add_gateway(self, number: int) -> None:
        client = RouterClient(["routers:1"], ACCESS, number.to_bytes(16))
        await client.start()
        self._stack.push_async_callback(client.close)
        self.gateways.append(client)

    def counts(self) -> Counter[str]:
        """Requests that each router has ended."""
        return Counter({r.address: r.core.dispatcher.outcomes["ok"] for r in self.routers})

    async def ask(self, first: int, count: int, width: int = 20) -> None:
        """Requests through the gateways in turn, some of which begin alike."""
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

        await asyncio.gather(*(one(number) for number in range(first, first + count)))

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def system(anyio_backend: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[System]:
    made = System()
    for module in ("gateway.router_client.client", "services.worker.membership"):
        monkeypatch.setattr(f"pdserve.{module}.resolve", lambda name: made.addresses)
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.1)
    for _ in range(ROUTERS):
        await made.add_router()
    for _ in range(WORKERS):
        await made.add_worker()
    for number in range(GATEWAYS):
        await made.add_gateway(number)
    await eventually(lambda: all(_ready(r) for r in made.routers))
    yield made
    await made.close()


def _ready(router: RouterProcess) -> bool:
    workers = router.core.fleet.workers.values()
    return len(workers) == WORKERS and all(worker.connected for worker in workers)


async def test_the_busiest_router_has_little_more_than_the_mean(system: System) -> None:
    await system.ask(0, REQUESTS)
    counts = system.counts()
    assert sum(counts.values()) == REQUESTS
    assert max(counts.values()) <= 1.2 * REQUESTS / ROUTERS, counts


async def test_a_router_that_is_added_has_its_share_soon(system: System) -> None:
    await system.ask(0, 300)
    added = await system.add_router()
    await eventually(lambda: _ready(added))
    await system.ask(1000, 300)  # meanwhile the gateways find it
    before = system.counts()
    await system.ask(2000, 660)
    now = system.counts()
    share = now[added.address] - before[added.address]
    assert 0.8 * 60 <= share <= 1.6 * 60, now - before


async def test_a_router_that_goes_takes_no_request_with_it(system: System) -> None:
    asking = asyncio.create_task(system.ask(0, REQUESTS))
    await eventually(lambda: sum(system.counts().values()) > 100)
    gone = system.routers.pop()
    await gone.stop(0)
    await asking
    assert len(system.addresses) == ROUTERS - 1
