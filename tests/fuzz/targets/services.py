"""Messages to every method of a router, a decode and a prefill worker that run in this process.

No message makes a handler raise an unexpected error, and all services keep serving.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random
from unittest import mock

import grpc
from builders.engine_kit import fake_engine
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from systems import worker_kit
from systems.cluster_secret import SECRET, open_channel

from fuzz.messages import fill
from fuzz.mutate import mutate
from pdserve.protos import common_pb2, fleet_pb2, router_pb2, worker_pb2
from pdserve.services.common.rpc import PROTOCOL_VERSION
from pdserve.services.router.main import RouterProcess
from pdserve.services.router.settings import RouterSettings

NOBODY = "127.0.0.1:1"  # address of workers that fuzzed messages invent
METHODS: dict[str, tuple[type[Message], bool]] = {  # (request, whether it is a stream)
    "Router/Session": (router_pb2.GatewayMessage, True),
    "Router/Generate": (router_pb2.GenerateRequest, False),
    "Router/ListModels": (router_pb2.ListModelsRequest, False),
    "Router/GetFleet": (router_pb2.GetFleetRequest, False),
    "Router/Pick": (router_pb2.PickRequest, False),
    "Fleet/Join": (fleet_pb2.WorkerReport, True),
    "Blobs/GetBlob": (common_pb2.BlobRequest, False),
    "Decode/Session": (worker_pb2.DecodeCommand, True),
    "Prefill/Session": (worker_pb2.PrefillCommand, True),
}
_HELLO = worker_pb2.SessionHello(router_incarnation=bytes(16), protocol=PROTOCOL_VERSION)
HELLOS: dict[str, Message] = {  # workers refuse a session without one
    "Decode/Session": worker_pb2.DecodeCommand(hello=_HELLO),
    "Prefill/Session": worker_pb2.PrefillCommand(hello=_HELLO),
}
CALL_S = 0.01  # longer answers are not awaited
LOOK = 10  # all must serve after the first case and after every LOOK cases


class Findings(logging.Handler):
    """Collects log records with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0]:
            self.found.append(self.format(record))


class Fuzzed:
    def __init__(self, folder: Path) -> None:
        logging.disable(logging.NOTSET)
        logging.getLogger().setLevel(logging.CRITICAL)
        self._findings = Findings()
        for name in ("pdserve", "grpc", "asyncio"):
            logger = logging.getLogger(name)
            logger.setLevel(logging.WARNING)
            logger.addHandler(self._findings)
            logger.propagate = False
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        patch = mock.patch("pdserve.services.worker.process.build_engine", self._build)
        patch.start()
        self._addresses = self._runner.run(self._start(folder))
        self._cases = 0

    @staticmethod
    def _build(config: object, progress: object) -> object:
        return fake_engine(num_blocks=64), worker_kit.CARD

    async def _start(self, folder: Path) -> dict[str, str]:
        self._router = router = RouterProcess(
            RouterSettings(cluster_secret=(SECRET,), queue_timeout_s=0.1)
        )
        await router.start()
        pair = await self._stack.enter_async_context(
            worker_kit.worker_pair(folder, routers=(router.address,), trace_mb=0)
        )
        addresses = {
            "Router": router.address,
            "Fleet": router.address,
            "Blobs": router.address,
            "Decode": pair.decode_worker.address,
            "Prefill": pair.prefill_worker.address,
        }
        self._healths = [
            health_pb2_grpc.HealthStub(await self._stack.enter_async_context(open_channel(address)))
            for address in set(addresses.values())
        ]
        return addresses

    def case(self, rng: Random) -> str:
        found = self._runner.run(self._call(rng))
        if self._cases % LOOK == 0:
            self._runner.run(self._look())
        self._cases += 1
        assert not self._findings.found, self._findings.found[0]
        return found

    async def _call(self, rng: Random) -> str:
        method = rng.choice(list(METHODS))
        make, streams = METHODS[method]
        messages = [self._message(rng, make) for _ in range(rng.randint(1, 6) if streams else 1)]
        if method in HELLOS and rng.random() < 0.9:
            messages.insert(0, HELLOS[method].SerializeToString())
        address = self._addresses[method.partition("/")[0]]

        async def requests() -> AsyncIterator[bytes]:
            for message in messages:
                yield message
            await asyncio.sleep(CALL_S)

        name = f"/pdserve.v1.{method}"
        async with open_channel(address) as channel:
            call = (
                channel.stream_stream(name)(requests())
                if streams
                else channel.unary_stream(name)(messages[0])
            )
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(2 * CALL_S):
                        async for _ in call:
                            pass
                call.cancel()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNKNOWN:  # its handler raised
                    raise
                return error.code().name
        return "OK"

    @staticmethod
    def _message(rng: Random, make: type[Message]) -> bytes:
        message = make()
        fill(rng, message, rng.choice((0.2, 0.5, 0.9)))
        if isinstance(message, fleet_pb2.WorkerReport) and message.hello.address:
            message.hello.address = NOBODY
        data = message.SerializeToString()
        return mutate(rng, data) if rng.random() < 0.2 else data

    async def _look(self) -> None:
        for health in self._healths:
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
