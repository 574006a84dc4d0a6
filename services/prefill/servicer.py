"""The Prefill service: converts commands and calls PrefillCore."""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from pdserve.protos.worker_pb2 import PrefillCommand, PrefillMessage, PrefillStart
from pdserve.protos.worker_pb2_grpc import PrefillServicer
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.rpc.fragments import IdsCollector
from pdserve.services.prefill.core import PrefillCore, PrefillSession

log = logging.getLogger(__name__)


class PrefillService(PrefillServicer):
    """One multiplexed session for each router."""

    def __init__(self, core: PrefillCore) -> None:
        self._core = core

    async def Session(
        self, request_iterator: AsyncIterator[PrefillCommand], context: Any
    ) -> AsyncIterator[PrefillMessage]:
        batches = self._core.serve(partial(self._read, request_iterator), context)
        async with aclosing(batches):
            async for events in batches:
                yield PrefillMessage(events=events)

    async def _read(self, commands: AsyncIterator[PrefillCommand], session: PrefillSession) -> None:
        ids = IdsCollector()
        async for command in commands:
            match command.WhichOneof("command"):
                case "ids_part":
                    ids.collect(command.ids_part)
                case "start":
                    self._start(session, command.start, ids)
                case "cancel":
                    self._core.cancel(session, command.cancel.attempt)
                case "hello":
                    self._core.greet(session, command.hello)
                    log.debug("router %s opened a session", command.hello.router_boot.hex())
                case _:
                    log.warning("ignored an empty or unknown command")

    def _start(self, session: PrefillSession, start: PrefillStart, ids: IdsCollector) -> None:
        try:
            prompt_ids = ids.take(start.attempt.hex(), start.ids)
        except ServiceError as error:
            self._core.refuse(session, start.attempt, error)
        else:
            self._core.start(session, start, prompt_ids)
