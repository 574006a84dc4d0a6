"""A FakeRouter behind a real gRPC server, as gateways see a router."""

import asyncio
from typing import Any

from systems.cluster_secret import ACCESS

from fakes.router import FakeRouter
from pdserve.protos import common_pb2 as pb
from pdserve.protos import common_pb2_grpc, router_pb2, router_pb2_grpc
from pdserve.services.common.rpc import PROTOCOL_VERSION, IdsCollector
from pdserve.services.common.server import GrpcServer


class RouterServicer(router_pb2_grpc.RouterServicer, common_pb2_grpc.BlobsServicer):
    def __init__(self, router: FakeRouter) -> None:
        self.router = router
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()  # whole requests
        self.hosts: list[str] = []  # returned to pickers, limited to hosts that they name
        self.picks: list[router_pb2.PickRequest] = []

    async def Session(self, requests: Any, context: Any) -> Any:
        events: asyncio.Queue[router_pb2.RequestEvent] = asyncio.Queue()
        reading = asyncio.create_task(self._read(requests, events))
        try:
            yield router_pb2.RouterMessage(protocol=PROTOCOL_VERSION)
            while True:
                yield router_pb2.RouterMessage(events=[await events.get()])
        finally:
            reading.cancel()

    async def _read(self, requests: Any, events: asyncio.Queue[router_pb2.RequestEvent]) -> None:
        ids = IdsCollector()
        running: dict[str, asyncio.Task[None]] = {}
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "ids_part":
                ids.add(message.ids_part)
            elif kind == "cancel":
                self.router.cancel(message.cancel.request, message.cancel.choices)
                if not message.cancel.choices:
                    running[message.cancel.request].cancel()
                    await self.cancelled.put(message.cancel.request)
            elif kind == "start":
                start = message.start
                whole = ids.take(start.request, start.prompt_ids)
                del start.prompt_ids[:]
                start.prompt_ids.extend(whole)
                running[start.request] = asyncio.create_task(self._play(start, events))

    async def _play(self, start: pb.Start, events: asyncio.Queue[router_pb2.RequestEvent]) -> None:
        async for event in self.router.open(start):
            await events.put(event)

    async def ListModels(self, request: Any, context: Any) -> router_pb2.ListModelsResponse:
        return router_pb2.ListModelsResponse(models=await self.router.models())

    async def GetFleet(self, request: Any, context: Any) -> router_pb2.FleetView:
        return await self.router.fleet()

    async def Pick(self, request: router_pb2.PickRequest, context: Any) -> router_pb2.PickReply:
        self.picks.append(request)
        known = [host for host in self.hosts if host in request.hosts]
        workers = [router_pb2.PickedWorker(host=host) for host in known]
        return router_pb2.PickReply(workers=workers, elsewhere=not self.hosts)

    async def GetBlob(self, request: pb.BlobRequest, context: Any) -> Any:
        data = await self.router.blob(request.digest)
        for at in range(0, len(data), 190 << 10):
            yield pb.BlobChunk(data=data[at : at + (190 << 10)])


async def serve_router(router: FakeRouter) -> tuple[RouterServicer, GrpcServer, str]:
    """Return the servicer, its host (stop it), and its address."""
    servicer = RouterServicer(router)
    host = GrpcServer(ACCESS)
    router_pb2_grpc.add_RouterServicer_to_server(servicer, host.server)
    common_pb2_grpc.add_BlobsServicer_to_server(servicer, host.server)
    address = f"127.0.0.1:{host.listen('127.0.0.1:0')}"
    await host.start()
    return servicer, host, address
