"""The decode process: its gRPC service, and the construction of its parts."""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from pdserve.engine.api import EngineConfig
from pdserve.engine.checkpoints import CardData
from pdserve.engine.engine import Engine
from pdserve.protos import worker_pb2_grpc
from pdserve.protos.worker_pb2 import DecodeCommand, DecodeMessage
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.lifecycle import Report, silent
from pdserve.services.common.rpc import IdsCollector
from pdserve.services.common.tracing import NO_TRACER, Tracer
from pdserve.services.decode.attempt import DecodeSession
from pdserve.services.decode.core import DecodeCore
from pdserve.services.decode.runtime import DecodeCallbacks, DecodeRuntime
from pdserve.services.worker.process import WorkerRole, run_worker
from pdserve.services.worker.settings import DecodeSettings

log = logging.getLogger(__name__)


class DecodeServicer(worker_pb2_grpc.DecodeServicer):
    """The Decode gRPC service: each router has one session, which carries all its requests."""

    def __init__(self, core: DecodeCore) -> None:
        self._core = core

    async def Session(
        self, request_iterator: AsyncIterator[DecodeCommand], context: Any
    ) -> AsyncIterator[DecodeMessage]:
        batches = self._core.serve(request_iterator, self._carry_out, context)
        async with aclosing(batches):
            async for events in batches:
                yield DecodeMessage(events=events)

    def _carry_out(self, session: DecodeSession, command: DecodeCommand, ids: IdsCollector) -> None:
        match command.WhichOneof("command"):
            case "admit":
                admit = command.admit
                try:
                    prompt_ids = ids.take(admit.start.request, admit.start.prompt_ids)
                except ServiceError as error:
                    self._core.refuse(session, admit, error)
                else:
                    self._core.admit(session, admit, prompt_ids)
            case "cancel":
                self._core.cancel(session, command.cancel.attempt, command.cancel.choices)
            case "resume":
                self._core.resume(session, command.resume)
            case "hold":
                self._core.freeze(session, command.hold.attempt)
            case "move":
                self._core.migrate(session, command.move)
            case "stay":
                self._core.unfreeze(session, command.stay.attempt)
            case _:
                log.warning("the decode worker ignored a router's command that it does not support")


class DecodeRole(WorkerRole[DecodeSettings, DecodeCore, DecodeRuntime]):
    """The parts of a decode process that differ from a prefill process: service, core and
    runtime."""

    service = "pdserve.v1.Decode"

    def __init__(
        self, settings: DecodeSettings, config: EngineConfig, tracer: Tracer = NO_TRACER
    ) -> None:
        super().__init__(settings, config, DecodeCore(tracer))

    def register(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(self.core), server)

    def make_runtime(self, engine: Engine, card: CardData, incarnation: bytes) -> DecodeRuntime:
        core = self.core
        callbacks = DecodeCallbacks(
            on_step=self.on_loop(core.on_step),
            on_received=self.on_loop(core.on_received),
            on_lost=self.on_loop(core.on_lost),
            on_verified=self.on_loop(core.on_verified),
            on_attached=self.on_loop(core.on_attached),
            on_place_again=self.on_loop(core.on_place_again),
            on_migration_ended=self.on_loop(core.on_migration_ended),
        )
        return DecodeRuntime(
            self.settings, engine, card, incarnation, callbacks, core.leases.figures
        )


def run(settings: DecodeSettings, engine: EngineConfig, report: Report = silent) -> int:
    """Run a decode process until a signal. Returns the exit code, and raises the errors of
    `run_worker`."""
    return run_worker(
        settings, lambda tracer: DecodeRole(settings, engine, tracer), "decode", report
    )
