"""Messages to the gateway's gRPC service, over a router with scripted answers.

Every message is answered or refused with a typed error, never with an unexpected one.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from random import Random

import grpc.aio
from fakes.router import FakeRouter, saying
from fakes.scripted_service import scripted_service
from google.protobuf.message import Message
from systems.cluster_secret import ACCESS

from fuzz.messages import fill
from fuzz.mutate import mutate
from pdserve.gateway.grpc_api import SERVICE, TEXT_METHODS, TextServicer
from pdserve.protos.text_pb2 import ChatRequest, CompleteRequest
from pdserve.protos.text_pb2_grpc import add_TextServicer_to_server
from pdserve.services.common.rpc import Backpressure
from pdserve.services.common.server import GrpcServer
from pdserve.services.common.tenants import ApiKeys

REQUESTS: dict[str, type[Message]] = {"Chat": ChatRequest, "Complete": CompleteRequest}
BACKPRESSURE = Backpressure(1 << 16, 5.0)
UNFORESEEN = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


class Fuzzed:
    def __init__(self, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self._channel = self._runner.run(self._open())

    async def _open(self) -> grpc.aio.Channel:
        self._host = GrpcServer(ACCESS, TEXT_METHODS, (SERVICE,))
        service = scripted_service(FakeRouter(saying("hello world")))
        text = TextServicer(service, ApiKeys(), BACKPRESSURE, max_bytes=1 << 24)
        add_TextServicer_to_server(text, self._host.server)
        port = self._host.listen("127.0.0.1:0")
        await self._host.start()
        return grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    def case(self, rng: Random) -> str:
        method = rng.choice(list(REQUESTS))
        message = REQUESTS[method]()
        fill(rng, message, rng.choice((0.2, 0.5, 0.9)))
        message.model = rng.choice(("", "tiny", message.model))  # type: ignore[attr-defined]
        data = message.SerializeToString()
        if rng.random() < 0.2:
            data = mutate(rng, data)
        return self._runner.run(self._ask(method, data))

    async def _ask(self, method: str, data: bytes) -> str:
        call = self._channel.unary_stream(f"/{SERVICE}/{method}")(data)
        with suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        code, details = await call.code(), await call.details()
        assert code not in UNFORESEEN, details
        assert len(details or "") < 4096, "the error quotes too much of the input"
        return str(code.name)
