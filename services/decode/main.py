"""The decode process: builds its parts, serves, drains."""

import grpc.aio

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.checkpoints.card import CardData
from pdserve.engine.engine import Engine
from pdserve.protos.worker_pb2_grpc import add_DecodeServicer_to_server
from pdserve.services.decode.core import DecodeCore
from pdserve.services.decode.runtime import DecodeCallbacks, DecodeRuntime
from pdserve.services.decode.servicer import DecodeService
from pdserve.services.decode.settings import DecodeSettings
from pdserve.services.host.lifecycle import Report, silent
from pdserve.services.host.tracing import NO_TRACER, Tracer
from pdserve.services.worker.process import run_worker
from pdserve.services.worker.role import WorkerRole


class DecodeRole(WorkerRole[DecodeSettings, DecodeCore, DecodeRuntime]):
    """The parts of a decode process."""

    service = "pdserve.v1.Decode"

    def __init__(
        self, settings: DecodeSettings, config: EngineConfig, tracer: Tracer = NO_TRACER
    ) -> None:
        super().__init__(settings, config, DecodeCore(tracer))

    def register(self, server: grpc.aio.Server) -> None:
        add_DecodeServicer_to_server(DecodeService(self.core), server)

    def make_runtime(self, engine: Engine, card: CardData, boot: bytes) -> DecodeRuntime:
        core = self.core
        callbacks = DecodeCallbacks(
            on_step=self.on_loop(core.on_step),
            on_received=self.on_loop(core.on_received),
            on_lost=self.on_loop(core.on_lost),
            on_verified=self.on_loop(core.on_verified),
            on_attached=self.on_loop(core.on_attached),
            on_place_again=self.on_loop(core.on_place_again),
            on_migration_ended=self.on_loop(core.migrations.on_ended),
        )
        return DecodeRuntime(self.settings, engine, card, boot, callbacks, core.leases.figures)


def run(settings: DecodeSettings, engine: EngineConfig, report: Report = silent) -> int:
    """Serve until a signal; return the exit code. Raises OSError if an address is taken, and the
    errors of loading the model."""
    return run_worker(
        settings, lambda tracer: DecodeRole(settings, engine, tracer), "decode", report
    )
