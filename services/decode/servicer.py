"""The Decode service: converts commands and calls DecodeCore."""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from pdserve.protos.worker_pb2 import Admit, DecodeCommand, DecodeMessage
from pdserve.protos.worker_pb2_grpc import DecodeServicer
from pdserve.services.decode.attempt import DecodeSession
from pdserve.services.decode.core import DecodeCore
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.rpc.fragments import IdsCollector

log = logging.getLogger(__name__)


class DecodeService(DecodeServicer):
    """One multiplexed session for each router."""

    def __init__(self, core: DecodeCore) -> None:
        self._core = core

    async def Session(
        self, request_iterator: AsyncIterator[DecodeCommand], context: Any
    ) -> AsyncIterator[DecodeMessage]:
        batches = self._core.serve(partial(self._read, request_iterator), context)
        async with aclosing(batches):
            async for events in batches:
                yield DecodeMessage(events=events)

    async def _read(self, commands: AsyncIterator[DecodeCommand], session: DecodeSession) -> None:
        ids = IdsCollector()
        async for command in commands:
            match command.WhichOneof("command"):
                case "ids_part":
                    ids.collect(command.ids_part)
                case "admit":
                    self._admit(session, command.admit, ids)
                case "cancel":
                    cancel = command.cancel
                    self._core.cancel(session, cancel.attempt, cancel.choices)
                case "resume":
                    self._core.resume(session, command.resume)
                case "hold":
                    self._core.migrations.hold(session, command.hold.attempt)
                case "move":
                    self._core.migrations.move(session, command.move)
                case "stay":
                    self._core.migrations.stay(session, command.stay.attempt)
                case "hello":
                    session.outbox.reads_rows = command.hello.reads_rows
                    self._core.greet(session, command.hello)
                    log.debug("router %s opened a session", command.hello.router_boot.hex())
                case _:
                    log.warning("ignored an empty or unknown command")

    def _admit(self, session: DecodeSession, admit: Admit, ids: IdsCollector) -> None:
        start = admit.start
        try:
            prompt_ids = ids.take(start.request, start.prompt_ids)
        except ServiceError as error:
            self._core.refuse(session, admit, error)
        else:
            self._core.admit(session, admit, prompt_ids)
