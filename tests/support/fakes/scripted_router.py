"""A scripted router behind real gRPC, and the requests of a test through a RouterClient."""

import asyncio

from systems.cluster_secret import ACCESS
from systems.eventually import eventually

from pdserve.gateway.router_client import RouterClient
from pdserve.protos import common_pb2 as pb
from pdserve.protos import common_pb2_grpc, router_pb2, router_pb2_grpc
from pdserve.services.common.errors import ServiceError, abort
from pdserve.services.common.rpc import PROTOCOL_VERSION, IdsCollector
from pdserve.services.common.server import GrpcServer

BLOB = b"x" * 500_000
Event = router_pb2.RequestEvent


class Router(router_pb2_grpc.RouterServicer, common_pb2_grpc.BlobsServicer):
    """Generates `count` tokens for each request from its position; can hang up in between."""

    def __init__(self) -> None:
        self.starts: list[pb.Start] = []
        self.cancels: asyncio.Queue[router_pb2.Cancel] = asyncio.Queue()
        self.hang_up_after: int | None = None  # tokens of the next session
        self.silent = False
        self.hangs = False  # on requests for models, the fleet or a blob
        self.num_hanging = 0
        self.num_lists = 0  # requests for models
        self.num_picks = 0
        self.refuses = False  # new requests
        self.lacks: pb.Failed | None = None  # its message that it has no worker for a request
        self.models = ["tiny"]
        self.pool = ""  # of their cards
        self.join_routers = 0  # of its decode worker, whose incarnation is
        self.decode_incarnation = b""
        self.workers: list[router_pb2.WorkerView] = []
        self.hold_after: int | None = None  # tokens, once: then nothing more on that session
        self.hellos: list[bytes] = []
        self.blob_calls = 0
        self.wrong_blob = False
        self.protocol = PROTOCOL_VERSION
        self.checks_version = False

    async def Session(self, requests, context):
        ids = IdsCollector()
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "hello":
                self.hellos.append(message.hello.incarnation)
                if self.checks_version and abs(message.hello.protocol - self.protocol) > 1:
                    error = ServiceError(pb.INCOMPATIBLE_VERSION, "too old or too new")
                    await abort(context, error)
                yield router_pb2.RouterMessage(protocol=self.protocol)
            elif kind == "ids_part":
                ids.add(message.ids_part)
            elif kind == "cancel":
                await self.cancels.put(message.cancel)
            elif kind == "start":
                start = message.start
                whole = ids.take(start.request, start.prompt_ids)
                del start.prompt_ids[:]
                start.prompt_ids.extend(whole)
                self.starts.append(start)
                if self.silent:
                    continue
                async for event in self._answer(start):
                    yield router_pb2.RouterMessage(events=[event])
                if self.hang_up_after is not None:
                    self.hang_up_after = None
                    return

    async def _answer(self, start):
        if self.refuses:
            failure = pb.Failure(code=pb.UNAVAILABLE, message="shutting down")
            failed = pb.Failed(request=start.request, epoch=start.epoch, failure=failure)
            yield Event(failed=failed)
            return
        if self.lacks is not None:
            failed = pb.Failed(request=start.request, epoch=start.epoch)
            failed.MergeFrom(self.lacks)
            yield Event(failed=failed)
            return
        placement = pb.Placement(
            attempt=bytes([start.epoch]) * 16,
            decode_address="d:1",
            decode_incarnation=self.decode_incarnation,
        )
        placed = router_pb2.Placed(
            request=start.request,
            epoch=start.epoch,
            placement=placement,
            join_routers=self.join_routers,
        )
        yield Event(placed=placed)
        have = len(start.choices[0].generated_ids) if start.choices else 0
        for position in range(max(0, have - 1), 6):  # one token again: it must not count twice
            if position - have == self.hang_up_after:
                return
            if position - have == self.hold_after:
                self.hold_after = None
                await asyncio.Event().wait()
            yield Event(
                tokens=pb.Tokens(
                    request=start.request, epoch=start.epoch, position=position,
                    ids=[100 + position], finish=pb.LENGTH if position == 5 else 0,
                )
            )  # fmt: skip
        yield Event(finished=pb.Finished(request=start.request, epoch=start.epoch))

    async def _hang(self):
        if self.hangs:
            self.num_hanging += 1
            await asyncio.Event().wait()

    async def ListModels(self, request, context):
        self.num_lists += 1
        await self._hang()
        models = [pb.ModelCard(name=name, pool=self.pool) for name in self.models]
        return router_pb2.ListModelsResponse(models=models, sharded=self.join_routers > 0)

    async def GetFleet(self, request, context):
        await self._hang()
        return router_pb2.FleetView(prefill_local=7, workers=self.workers)

    async def Pick(self, request, context):
        self.num_picks += 1
        return router_pb2.PickReply(elsewhere=True)

    async def GetBlob(self, request, context):
        await self._hang()
        self.blob_calls += 1
        data = b"other" if self.wrong_blob else BLOB
        for at in range(0, len(data), 190 << 10):
            yield pb.BlobChunk(data=data[at : at + (190 << 10)])


class Served:
    """A router process in miniature: start, stop, restart on the same port."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.port = 0

    async def start(self) -> str:
        self.host = GrpcServer(ACCESS)
        router_pb2_grpc.add_RouterServicer_to_server(self.router, self.host.server)
        common_pb2_grpc.add_BlobsServicer_to_server(self.router, self.host.server)
        self.port = self.host.listen(f"127.0.0.1:{self.port}")
        await self.host.start()
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        await self.host.stop(0)


def start(request: str = "r", **fields) -> pb.Start:
    values = {"model": "tiny", "prompt_ids": [1, 2, 3]}
    values |= {"remaining_ms": 60_000, "queue_remaining_ms": 9_000}
    return pb.Start(request=request, **(values | fields))


async def ids_of(client: RouterClient, request: pb.Start) -> tuple[list[int], Event]:
    ids: list[int] = []
    last = Event()
    async for event in client.open(request):
        ids += event.tokens.ids
        last = event
    return ids, last


async def connected(client: RouterClient) -> None:
    await eventually(lambda: client.num_connected)
