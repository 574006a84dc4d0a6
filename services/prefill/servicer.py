"""The Prefill service: validates, converts, calls PrefillCore."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from pdserve.protos import common_pb2 as pb
from pdserve.protos.worker_pb2 import PrefillCommand, PrefillMessage
from pdserve.protos.worker_pb2_grpc import PrefillServicer
from pdserve.services.host.errors import ServiceError, abort
from pdserve.services.host.fragments import IdsCollector
from pdserve.services.prefill.core import PrefillCore, PrefillSession

log = logging.getLogger(__name__)


class PrefillService(PrefillServicer):
    """One multiplexed session per router."""

    def __init__(self, core: PrefillCore) -> None:
        self._core = core

    async def Session(
        self, request_iterator: AsyncIterator[PrefillCommand], context: Any
    ) -> AsyncIterator[PrefillMessage]:
        if not self._core.ready:
            await abort(context, ServiceError(pb.UNAVAILABLE, "the model is loading"))
        session = self._core.open_session()
        reader = asyncio.create_task(self._read(session, request_iterator))
        reader.add_done_callback(lambda _: session.outbox.close())
        try:
            async for events in session.outbox:
                yield PrefillMessage(events=events)
            if reader.done():
                await reader  # its error, if it has one, ends the stream
        finally:
            reader.cancel()
            self._core.close_session(session)

    async def _read(self, session: PrefillSession, commands: AsyncIterator[PrefillCommand]) -> None:
        ids = IdsCollector()
        async for command in commands:
            match command.WhichOneof("command"):
                case "ids_part":
                    try:
                        ids.add(command.ids_part)
                    except ServiceError as error:
                        # The start that follows is refused for its length.
                        log.warning("%s", error)
                case "start":
                    start = command.start
                    self._core.start(session, start, ids.take(start.attempt.hex(), start.ids))
                case "cancel":
                    self._core.cancel(session, command.cancel.attempt)
                case "hello":
                    log.debug("session of router %s", command.hello.router_boot.hex())
                case _:
                    log.warning("an empty or unknown command was ignored")
