"""A decode worker without an engine: it answers each request at once with one token."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pdserve.protos import common_pb2 as pb
from pdserve.protos import fleet_pb2
from pdserve.protos import worker_pb2 as wire
from pdserve.protos.worker_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server
from pdserve.services.common.auth.access import Access
from pdserve.services.common.rpc import PROTOCOL_VERSION, TokensOutbox
from pdserve.services.common.server import GrpcServer
from pdserve.services.worker.membership import Membership

TOKEN = 7


class OneTokenWorker(DecodeServicer):
    """Joins every router that the names resolve to, between `start` and `close`."""

    def __init__(self, routers: Sequence[str], access: Access, card: pb.ModelCard) -> None:
        self.host = GrpcServer(access)
        self._routers, self._access, self._card = routers, access, card
        add_DecodeServicer_to_server(self, self.host.server)

    async def start(self) -> None:
        address = f"127.0.0.1:{self.host.listen('127.0.0.1:0')}"
        await self.host.start()
        hello = fleet_pb2.WorkerHello(
            role=fleet_pb2.DECODE,
            incarnation=os.urandom(16),
            address=address,
            card=self._card,
            transports=["tcp"],
            wire_version=1,
            protocol=PROTOCOL_VERSION,
        )
        self._membership = Membership(hello, self._routers, self._access)
        self._membership.start()

    async def close(self) -> None:
        await asyncio.to_thread(self._membership.close)
        await self.host.stop(0)

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[wire.DecodeMessage]:
        outbox = TokensOutbox(wire.DecodeEvent)
        reader = asyncio.create_task(self._read(requests, outbox))
        try:
            async for batch in outbox:
                yield wire.DecodeMessage(events=batch)
        finally:
            reader.cancel()

    async def _read(self, commands: Any, outbox: TokensOutbox[wire.DecodeEvent]) -> None:
        async for command in commands:
            if command.HasField("admit"):
                attempt = command.admit.attempt
                tokens = pb.Tokens(attempt=attempt, ids=[TOKEN], finish=pb.LENGTH)
                outbox.put(wire.DecodeEvent(admitted=wire.Admitted(attempt=attempt)))
                outbox.put(wire.DecodeEvent(tokens=tokens))
                outbox.put(wire.DecodeEvent(finished=pb.Finished(attempt=attempt)))
            elif command.HasField("resume"):
                outbox.put(wire.DecodeEvent(gone=wire.Gone(attempt=command.resume.attempt)))
