"""Ten routers place on the same workers, which have little room: no worker takes more than it has
room for, and every request is answered.
"""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from oracles.rings import assert_conform
from systems.cluster_secret import ACCESS, SECRET
from systems.eventually import eventually
from systems.worker_kit import build_with, engine_maker, expected, prompt, start_worker

from pdserve.engine.api import EngineConfig
from pdserve.engine.handoff.incoming import Promises
from pdserve.gateway.router_client import RouterClient
from pdserve.gateway.router_client import client as client_module
from pdserve.protos import common_pb2 as pb
from pdserve.services.common import discovery
from pdserve.services.decode.servicer import DecodeRole
from pdserve.services.prefill.servicer import PrefillRole
from pdserve.services.router.main import RouterProcess
from pdserve.services.router.settings import RouterSettings
from pdserve.services.worker.process import WorkerProcess
from pdserve.services.worker.settings import DecodeSettings, PrefillSettings

pytestmark = [pytest.mark.anyio, pytest.mark.extended, pytest.mark.timeout(300)]

ROUTERS, GATEWAYS, DECODES = 10, 3, 2
REQUESTS, WIDTH = 400, 60
BLOCKS, BLOCK_TOKENS = 64, 4  # of a decode worker: room for a few requests
NAME = "routers:1"  # the common name of all routers


class System:
    """Ten routers, a prefill worker and decode workers that join all of them, and gateways."""

    def __init__(self, folder: Path) -> None:
        self.rings = folder / "rings"
        self.routers: list[RouterProcess] = []
        self.decodes: list[WorkerProcess] = []
        self.gateways: list[RouterClient] = []
        self.stack = AsyncExitStack()

    async def start(self) -> None:
        for _ in range(ROUTERS):
            settings = RouterSettings(cluster_secret=(SECRET,), remote_prefill="always")
            router = RouterProcess(settings)
            await router.start()
            self.stack.push_async_callback(router.stop, 0.1)
            self.routers.append(router)
        common: dict[str, Any] = {
            "cluster_secret": (SECRET,),
            "kv_transport": "tcp",
            "routers": (NAME,),
            "trace_dir": str(self.rings),
        }
        prefill = PrefillSettings(**common)
        await self._add(await start_worker(prefill, PrefillRole(prefill, EngineConfig())))
        for _ in range(DECODES):
            decode = DecodeSettings(**common)
            worker = await start_worker(decode, DecodeRole(decode, EngineConfig()))
            await self._add(worker)
            self.decodes.append(worker)
        for number in range(GATEWAYS):
            gateway = RouterClient([NAME], ACCESS, number.to_bytes(16))
            await gateway.start()
            self.stack.push_async_callback(gateway.close)
            self.gateways.append(gateway)
        await eventually(lambda: all(map(self._knows_all, self.routers)), "workers")
        await eventually(lambda: all(g.num_connected == ROUTERS for g in self.gateways), "sessions")

    async def _add(self, worker: WorkerProcess) -> None:
        self.stack.push_async_callback(worker.stop, 0.5)

    @staticmethod
    def _knows_all(router: RouterProcess) -> bool:
        workers = router.core.fleet.workers.values()
        return len(workers) == 1 + DECODES and all(worker.connected for worker in workers)

    async def ask(self, number: int) -> bytes:
        """Send one request and check its answer; return the decode worker's incarnation."""
        ids = prompt(30 + number % 20, seed=number)
        start = pb.Start(
            request=f"r{number}",
            model="tiny",
            prompt_ids=ids,
            remaining_ms=120_000,
            queue_remaining_ms=120_000,
            params=pb.SamplingParams(n=1, max_tokens=8, temperature=0.0),
        )
        events = [event async for event in self.gateways[number % GATEWAYS].open(start)]
        assert events[-1].HasField("finished"), events[-1]
        tokens = [id_ for e in events if e.HasField("tokens") for id_ in e.tokens.ids]
        assert tokens == expected(ids)[0]
        return next(
            e.placed.placement.decode_incarnation for e in events[::-1] if e.HasField("placed")
        )


async def test_workers_of_ten_routers_are_never_overcommitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System(tmp_path)
    monkeypatch.setattr(
        discovery, "resolve", lambda name: [router.address for router in system.routers]
    )
    monkeypatch.setattr(client_module, "RESOLVE_S", 0.1)
    build_with(monkeypatch, engine_maker(num_blocks=BLOCKS, block_size=BLOCK_TOKENS))
    offers: Counter[bool] = Counter()
    offer = Promises.offer

    def counted(self: Promises, *args: int) -> bool:
        accepted = offer(self, *args)
        offers[accepted] += 1
        return accepted

    monkeypatch.setattr(Promises, "offer", counted)
    peaks: list[int] = []

    async def watch() -> None:
        while True:
            peaks.append(max(worker.runtime.promised_tokens for worker in system.decodes))
            await asyncio.sleep(0.001)

    gate = asyncio.Semaphore(WIDTH)

    async def gated(number: int) -> bytes:
        async with gate:
            return await system.ask(number)

    async with system.stack:
        await system.start()
        watching = asyncio.create_task(watch())
        incarnations = Counter(await asyncio.gather(*map(gated, range(REQUESTS))))
        watching.cancel()
        outcomes = [router.core.dispatcher.outcomes for router in system.routers]
        preemptions = [w.runtime.engine.stats().preemptions for w in system.decodes]
    assert_conform(system.rings)

    assert offers[False], "no router found a worker full"
    assert max(peaks) <= BLOCKS * BLOCK_TOKENS
    assert preemptions == [0] * DECODES
    assert sum(outcomes, Counter()) == {"ok": REQUESTS}
    assert all(outcomes), "a router had no request"
    assert (
        min(incarnations[worker.incarnation] for worker in system.decodes) > REQUESTS / DECODES / 3
    )
