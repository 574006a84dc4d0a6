"""The Decode service: validates, converts, calls DecodeCore."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from pdserve.protos import common_pb2 as pb
from pdserve.protos.worker_pb2 import DecodeCommand, DecodeEvent, DecodeMessage
from pdserve.protos.worker_pb2_grpc import DecodeServicer
from pdserve.services.decode.core import DecodeCore
from pdserve.services.decode.served import DecodeSession
from pdserve.services.host.errors import ServiceError, abort
from pdserve.services.host.fragments import IdsCollector

log = logging.getLogger(__name__)


class DecodeService(DecodeServicer):
    """One multiplexed session per router."""

    def __init__(self, core: DecodeCore) -> None:
        self._core = core

    async def Session(
        self, request_iterator: AsyncIterator[DecodeCommand], context: Any
    ) -> AsyncIterator[DecodeMessage]:
        if not self._core.ready:
            await abort(context, ServiceError(pb.UNAVAILABLE, "the model is loading"))
        session = self._core.open_session()
        reader = asyncio.create_task(self._read(session, request_iterator))
        reader.add_done_callback(lambda _: session.outbox.close())
        try:
            async for events in session.outbox:
                yield DecodeMessage(events=events)
            if reader.done():
                await reader  # its error, if it has one, ends the stream
        finally:
            reader.cancel()
            self._core.close_session(session)

    async def _read(self, session: DecodeSession, commands: AsyncIterator[DecodeCommand]) -> None:
        ids = IdsCollector()
        async for command in commands:
            match command.WhichOneof("command"):
                case "ids_part":
                    self._collect(ids, session, command.ids_part)
                case "admit":
                    start = command.admit.start
                    prompt_ids = ids.take(start.request, start.prompt_ids)
                    self._core.admit(session, command.admit, prompt_ids)
                case "cancel":
                    cancel = command.cancel
                    self._core.cancel(session, cancel.attempt, cancel.choices)
                case "resume":
                    self._core.resume(session, command.resume)
                case "hold":
                    self._core.moving.hold(session, command.hold.attempt)
                case "move":
                    self._core.moving.move(session, command.move)
                case "stay":
                    self._core.moving.stay(session, command.stay.attempt)
                case "hello":
                    log.debug("session of router %s", command.hello.router_boot.hex())
                case _:
                    log.warning("an empty or unknown command was ignored")

    def _collect(self, ids: IdsCollector, session: DecodeSession, part: pb.IdsPart) -> None:
        try:
            ids.add(part)
        except ServiceError as error:
            failed = pb.Failed(request=part.key, failure=error.to_failure())
            session.outbox.put(DecodeEvent(failed=failed))
