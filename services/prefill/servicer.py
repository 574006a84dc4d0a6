"""The gRPC service of a prefill process, and the role that builds the process's parts."""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from pdserve.engine.api import EngineConfig
from pdserve.engine.checkpoints import CardData
from pdserve.engine.engine import Engine
from pdserve.protos import worker_pb2_grpc
from pdserve.protos.worker_pb2 import PrefillCommand, PrefillMessage
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.lifecycle import Report, silent
from pdserve.services.common.rpc import IdsCollector
from pdserve.services.common.tracing import NO_TRACER, Tracer
from pdserve.services.prefill.core import PrefillCore, PrefillRuntime, PrefillSession
from pdserve.services.worker.process import WorkerRole, run_worker
from pdserve.services.worker.settings import PrefillSettings

log = logging.getLogger(__name__)


class PrefillServicer(worker_pb2_grpc.PrefillServicer):
    """The gRPC service Prefill. A router opens one Session call, which carries all its requests."""

    def __init__(self, core: PrefillCore) -> None:
        self._core = core

    async def Session(
        self, request_iterator: AsyncIterator[PrefillCommand], context: Any
    ) -> AsyncIterator[PrefillMessage]:
        batches = self._core.serve(request_iterator, self._carry_out, context)
        async with aclosing(batches):
            async for events in batches:
                yield PrefillMessage(events=events)

    def _carry_out(
        self, session: PrefillSession, command: PrefillCommand, ids: IdsCollector
    ) -> None:
        match command.WhichOneof("command"):
            case "start":
                start = command.start
                try:
                    prompt_ids = ids.take(start.attempt.hex(), start.ids)
                except ServiceError as error:
                    self._core.refuse(session, start.attempt, error)
                else:
                    self._core.start(session, start, prompt_ids)
            case "cancel":
                self._core.cancel(session, command.cancel.attempt)
            case _:
                log.warning(
                    "the prefill worker ignored a router's command that it does not support"
                )


class PrefillRole(WorkerRole[PrefillSettings, PrefillCore, PrefillRuntime]):
    """The role of a prefill process: makes its core, its gRPC servicer and its runtime."""

    service = "pdserve.v1.Prefill"

    def __init__(
        self, settings: PrefillSettings, config: EngineConfig, tracer: Tracer = NO_TRACER
    ) -> None:
        super().__init__(settings, config, PrefillCore(tracer))

    def register(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(self.core), server)

    def make_runtime(self, engine: Engine, card: CardData, incarnation: bytes) -> PrefillRuntime:
        on_ended = self.on_loop(self.core.on_ended)
        return PrefillRuntime(self.settings, engine, card, incarnation, on_ended)


def run(settings: PrefillSettings, engine: EngineConfig, report: Report = silent) -> int:
    """Run a prefill process until a signal; return its exit code. Raises OSError if an address is
    taken, ValueError for settings that cannot work, and any error of loading the model."""
    return run_worker(
        settings, lambda tracer: PrefillRole(settings, engine, tracer), "prefill", report
    )
