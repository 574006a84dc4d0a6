"""The prefill process: builds its parts, serves, drains."""

import asyncio
from dataclasses import replace

import grpc.aio

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.build import build_engine
from pdserve.protos.worker_pb2_grpc import add_PrefillServicer_to_server
from pdserve.services.host.lifecycle import Report, silent
from pdserve.services.host.logs import configure_logging
from pdserve.services.prefill.core import PrefillCore
from pdserve.services.prefill.runtime import PrefillRuntime
from pdserve.services.prefill.servicer import PrefillService
from pdserve.services.prefill.settings import PrefillSettings
from pdserve.services.worker.worker import Progress, on_loop, serve_worker


class PrefillRole:
    """See services/worker/worker.py Role; construct it inside the running loop."""

    services = ("pdserve.v1.Prefill",)

    def __init__(self, settings: PrefillSettings, config: EngineConfig) -> None:
        self.core = PrefillCore()
        self._settings = settings
        self._config = config
        self._part: PrefillRuntime | None = None
        self._loop = asyncio.get_running_loop()

    def register(self, server: grpc.aio.Server) -> None:
        add_PrefillServicer_to_server(PrefillService(self.core), server)

    def build(self, boot: bytes, progress: Progress) -> PrefillRuntime:
        config = replace(self._config, threads=self._settings.threads)
        engine, card = build_engine(config, progress)
        on_ended = on_loop(self._loop, self.core.on_ended)
        self._part = PrefillRuntime(self._settings, engine, card, boot, on_ended)
        return self._part

    def attach(self) -> None:
        assert self._part is not None  # built
        self.core.attach(self._part)

    async def drain(self) -> None:
        await self.core.drain()


async def serve(settings: PrefillSettings, config: EngineConfig, report: Report) -> int:
    return await serve_worker(settings, PrefillRole(settings, config), report)


def run(settings: PrefillSettings, engine: EngineConfig, report: Report = silent) -> int:
    """Serve until a signal; returns the exit code. Raises OSError if an address is taken, and
    what loading the model raises."""
    configure_logging("prefill", settings.log_level)
    return asyncio.run(serve(settings, engine, report))
