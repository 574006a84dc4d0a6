"""Routers of which each decode worker joins two, real workers over paced fake engines that serve
two models, and a gateway's client; all in this process.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.engine_kit import fake_engine
from fakes.decoder import FakeDecoder, fake_spec

from pdserve.engine.api import EngineConfig
from pdserve.gateway.router_client import RouterClient
from pdserve.protos import common_pb2 as pb
from pdserve.services.common.discovery import rendezvous_order
from pdserve.services.decode.servicer import DecodeRole
from pdserve.services.router.main import RouterProcess
from pdserve.services.router.settings import RouterSettings
from pdserve.services.worker.process import WorkerProcess
from pdserve.services.worker.settings import DecodeSettings
from systems.cluster_secret import ACCESS, SECRET
from systems.eventually import eventually
from systems.worker_kit import CARD, start_worker

K = 2
PACE_S = 0.01  # a step
SLOW_S = 0.1  # a step while a test waits for an event that must occur during a stream
NAME = "routers:1"  # the common name of all routers


class PacedDecoder(FakeDecoder):
    """Takes a fixed time for every step."""

    pace_s = PACE_S  # of all of them

    def forward(self, batch: Any, kv: Any) -> Any:
        time.sleep(self.pace_s)
        return super().forward(batch, kv)


class ShardedSystem:
    """A sharded system; `addresses` are those that NAME resolves to."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.routers: dict[str, RouterProcess] = {}  # by address
        self.workers: dict[str, WorkerProcess] = {}  # by name
        self.stack = AsyncExitStack()
        self.client = RouterClient([NAME], ACCESS, b"g" * 16)
        self._folder, self._patch = folder, patch

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Make streams take ten times as long within it."""
        with self._patch.context() as patch:
            patch.setattr(PacedDecoder, "pace_s", SLOW_S)
            yield

    @property
    def addresses(self) -> list[str]:
        return list(self.routers)

    async def add_router(self, address: str = "127.0.0.1:0") -> str:
        router = RouterProcess(RouterSettings(cluster_secret=(SECRET,), bind=address))
        await router.start()
        self.stack.push_async_callback(router.stop, 0.1)
        self.routers[router.address] = router
        return router.address

    async def kill_router(self, address: str) -> None:
        await self.routers.pop(address).stop(0)

    async def add_worker(self, name: str, model: str, left_out: str) -> None:
        """Add a worker that joins all routers except one."""

        def build(config: EngineConfig, progress: Any) -> Any:
            engine = fake_engine(num_blocks=512, model=PacedDecoder(fake_spec()))
            return engine, replace(CARD, name=model)

        self._patch.setattr("pdserve.services.worker.process.build_engine", build)
        settings = DecodeSettings(
            cluster_secret=(SECRET,),
            kv_transport="tcp",
            shm_dir=str(self._folder),
            routers=(NAME,),
            join_routers=K,
        )
        role = DecodeRole(settings, EngineConfig())
        self.workers[name] = await start_worker(
            settings, role, incarnation_without(left_out, self.addresses)
        )

    async def kill_worker(self, name: str) -> None:
        """Kill a worker: its port refuses from now on."""
        await self.workers.pop(name).stop(0)

    def knows(self, router: str) -> dict[str, str]:
        """Return the states of the workers that a router can send to, by name."""
        fleet = self.routers[router].core.fleet
        found = {name: fleet.get(worker.incarnation) for name, worker in self.workers.items()}
        return {n: w.state.value for n, w in found.items() if w is not None and w.connected}

    def uses(self, router: str) -> set[str]:
        """Return the names of the workers on which streams of this router run."""
        used = {w.incarnation for w in self.routers[router].core.dispatcher.workers_in_use()}
        return {name for name, worker in self.workers.items() if worker.incarnation in used}

    async def begin(self) -> None:
        """Wait until the gateway has a session to every router."""
        await self.client.start()
        self.stack.push_async_callback(self.client.close)
        await eventually(lambda: self.client.num_connected == len(self.routers))

    async def close(self) -> None:
        for name in list(self.workers):
            await self.kill_worker(name)
        await self.stack.aclose()


class Stream:
    """One greedy request, and its result."""

    def __init__(self, client: RouterClient, number: int, model: str, max_tokens: int) -> None:
        self.prompt = [(7 * number + i * i) % 60 for i in range(8 + number)]
        self.ids: list[int] = []
        self.end: Any = None
        self.decode_incarnations: list[bytes] = []
        self._start = pb.Start(
            request=f"r{number}",
            model=model,
            prompt_ids=self.prompt,
            remaining_ms=120_000,
            queue_remaining_ms=60_000,
            params=pb.SamplingParams(n=1, max_tokens=max_tokens, temperature=0.0),
        )
        self.task = asyncio.create_task(self._run(client))

    async def _run(self, client: RouterClient) -> None:
        async for event in client.open(self._start):
            kind = event.WhichOneof("event")
            if kind == "tokens":
                assert event.tokens.position == len(self.ids)
                self.ids += event.tokens.ids
            elif kind == "placed":
                self.decode_incarnations.append(event.placed.placement.decode_incarnation)
            self.end = getattr(event, kind)


def incarnation_without(left_out: str, routers: Sequence[str]) -> bytes:
    """Return the incarnation of a worker for which that router comes last."""
    while rendezvous_order(incarnation := os.urandom(16), routers)[-1] != left_out:
        pass
    return incarnation
