"""A real router with fake workers that only send messages, and its gateways."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.router_workers import FakeDecode, FakePrefill, FakeWorker, token
from oracles.rings import assert_conform
from systems.cluster_secret import SECRET, open_channel
from systems.eventually import eventually
from systems.rows import SessionEvents

from pdserve.protos import common_pb2 as pb
from pdserve.protos import router_pb2 as rpc
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.common.rpc import PROTOCOL_VERSION, send_ids
from pdserve.services.common.tracing import NO_TRACER, Tracer
from pdserve.services.router.main import RouterProcess
from pdserve.services.router.settings import RouterSettings


class Gateway:
    """A raw gateway session."""

    def __init__(
        self,
        address: str,
        secret: str = SECRET,
        incarnation: bytes = b"",
        *,
        reads_rows: bool = True,
        protocol: int = PROTOCOL_VERSION,
    ) -> None:
        self.incarnation = incarnation or os.urandom(16)
        self.channel = open_channel(address, secret)
        self.stub = RouterStub(self.channel)
        self.events: dict[str, list[rpc.RequestEvent]] = {}
        self.reads_rows = reads_rows
        self.num_rows = 0  # tokens that came in rows
        self.protocol = protocol
        self.router_protocol = 0

    async def open(self) -> None:
        self.call = self.stub.Session()
        hello = rpc.GatewayHello(
            incarnation=self.incarnation, reads_rows=self.reads_rows, protocol=self.protocol
        )
        await self.call.write(rpc.GatewayMessage(hello=hello))
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        session = SessionEvents()
        async for message in self.call:
            self.router_protocol = max(self.router_protocol, message.protocol)
            for event in message.events:
                for kind, said in session.of(event):
                    of_request = self.events.setdefault(said.request, [])
                    of_request.append(rpc.RequestEvent(**{kind: said}))
            self.num_rows = session.num_rows

    async def start(
        self, request: str, prompt: list[int], *, max_tokens: int = 8, **fields: Any
    ) -> None:
        fields.setdefault("model", "tiny")
        n = fields.pop("n", 1)
        parts, tail = send_ids(request, prompt)
        for part in parts:
            await self.call.write(rpc.GatewayMessage(ids_part=part))
        start = pb.Start(request=request, prompt_ids=tail, seed=5, **fields)
        start.params.max_tokens = max_tokens
        start.params.n = n
        await self.call.write(rpc.GatewayMessage(start=start))

    async def cancel(self, request: str, *choices: int) -> None:
        cancel = rpc.Cancel(request=request, choices=choices)
        await self.call.write(rpc.GatewayMessage(cancel=cancel))

    def of(self, request: str, kind: str) -> list[Any]:
        events = self.events.get(request, [])
        return [getattr(e, kind) for e in events if e.WhichOneof("event") == kind]

    def ids(self, request: str, choice: int = 0) -> list[int]:
        """Return the ids of a choice; asserts that their positions have no gap and no overlap."""
        ids: list[int] = []
        for tokens in self.of(request, "tokens"):
            if tokens.choice == choice:
                assert tokens.position == len(ids)
                ids += tokens.ids
        return ids

    async def until(self, condition: Callable[[], bool]) -> None:
        await eventually(condition, self.events)

    async def end(self, request: str) -> pb.Finished | pb.Failed:
        """Return the one terminal event."""

        def terminal() -> list[Any]:
            return self.of(request, "finished") + self.of(request, "failed")

        await self.until(lambda: bool(terminal()))
        assert len(terminal()) == 1
        assert self.events[request][-1].WhichOneof("event") in ("finished", "failed")
        return terminal()[0]

    async def close(self) -> None:
        self.call.cancel()
        self.reader.cancel()
        await asyncio.gather(self.reader, return_exceptions=True)
        await self.channel.close()


class Cluster:
    """A real router with fakes around it."""

    def __init__(self, router: RouterProcess, settings: RouterSettings) -> None:
        self.router = router
        self.settings = settings
        self.workers: list[FakeWorker] = []
        self.gateways: list[Gateway] = []

    async def decode(self, *args: Any, port: int = 0, **kwargs: Any) -> FakeDecode:
        worker = FakeDecode(*args, **kwargs)
        await self._join(worker, port)
        return worker

    async def prefill(self, *args: Any, **kwargs: Any) -> FakePrefill:
        decodes = [w for w in self.workers if isinstance(w, FakeDecode)]
        worker = FakePrefill(decodes, *args, **kwargs)
        await self._join(worker, 0)
        return worker

    async def _join(self, worker: FakeWorker, port: int) -> None:
        await worker.start(self.router.address, port)
        self.workers.append(worker)
        fleet = self.router.core.fleet

        def connected() -> bool:
            known = fleet.get(worker.incarnation)
            return known is not None and known.connected

        await eventually(connected)

    async def gateway(self, **kwargs: Any) -> Gateway:
        gateway = Gateway(self.router.address, **kwargs)
        await gateway.open()
        self.gateways.append(gateway)
        return gateway

    async def restart(self) -> None:
        """Start another router on the same port, after this one is gone with all its state."""
        address = self.router.address
        await self.router.stop(0)
        self.router = RouterProcess(replace(self.settings, bind=address))
        await self.router.start()

    async def close(self) -> None:
        for gateway in self.gateways:
            await gateway.close()
        for worker in self.workers:
            await worker.kill()
        await self.router.stop(0)


MakeCluster = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def make_cluster(anyio_backend: str, tmp_path: Path) -> AsyncIterator[MakeCluster]:
    """Return a function that makes clusters; checks at the end the records of attempts of their
    routers.
    """
    made: list[Cluster] = []
    rings = tmp_path / "rings"

    async def make(tracer: Tracer = NO_TRACER, **settings: Any) -> Cluster:
        chosen = RouterSettings(cluster_secret=(SECRET,), trace_dir=str(rings), **settings)
        router = RouterProcess(chosen, tracer)
        await router.start()
        made.append(Cluster(router, chosen))
        return made[-1]

    yield make
    for cluster in made:
        await cluster.close()
    if made:
        assert_conform(rings, may_be_empty=True)


@pytest.fixture
def expected() -> Callable[..., list[int]]:
    """Return the ids that a fault-free run gives."""

    def ids(prompt: list[int], num: int, choice: int = 0, seed: int = 5) -> list[int]:
        return [token(prompt, seed, choice, position) for position in range(num)]

    return ids


@pytest.fixture
def wait_for() -> Callable[..., Awaitable[None]]:
    return eventually
