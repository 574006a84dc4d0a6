"""The prefill process: builds its parts, serves, drains."""

import grpc.aio

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.checkpoints.card import CardData
from pdserve.engine.engine import Engine
from pdserve.protos.worker_pb2_grpc import add_PrefillServicer_to_server
from pdserve.services.host.lifecycle import Report, silent
from pdserve.services.host.tracing import NO_TRACER, Tracer
from pdserve.services.prefill.core import PrefillCore
from pdserve.services.prefill.runtime import PrefillRuntime
from pdserve.services.prefill.servicer import PrefillService
from pdserve.services.prefill.settings import PrefillSettings
from pdserve.services.worker.process import run_worker
from pdserve.services.worker.role import WorkerRole


class PrefillRole(WorkerRole[PrefillSettings, PrefillCore, PrefillRuntime]):
    """The parts of a prefill process."""

    service = "pdserve.v1.Prefill"

    def __init__(
        self, settings: PrefillSettings, config: EngineConfig, tracer: Tracer = NO_TRACER
    ) -> None:
        super().__init__(settings, config, PrefillCore(tracer))

    def register(self, server: grpc.aio.Server) -> None:
        add_PrefillServicer_to_server(PrefillService(self.core), server)

    def make_runtime(self, engine: Engine, card: CardData, boot: bytes) -> PrefillRuntime:
        on_ended = self.on_loop(self.core.on_ended)
        return PrefillRuntime(self.settings, engine, card, boot, on_ended)


def run(settings: PrefillSettings, engine: EngineConfig, report: Report = silent) -> int:
    """Serve until a signal; return the exit code. Raises OSError if an address is taken, and the
    errors of loading the model."""
    return run_worker(
        settings, lambda tracer: PrefillRole(settings, engine, tracer), "prefill", report
    )
