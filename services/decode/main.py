"""The decode process: builds its parts, serves, drains."""

import asyncio
from dataclasses import replace

import grpc.aio

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.build import build_engine
from pdserve.protos.worker_pb2_grpc import add_DecodeServicer_to_server
from pdserve.services.decode.core import DecodeCore
from pdserve.services.decode.runtime import DecodeRuntime, Sink
from pdserve.services.decode.servicer import DecodeService
from pdserve.services.decode.settings import DecodeSettings
from pdserve.services.host.lifecycle import Report, silent
from pdserve.services.host.logs import configure_logging
from pdserve.services.worker.worker import Progress, on_loop, serve_worker


class DecodeRole:
    """See services/worker/worker.py Role; construct it inside the running loop."""

    services = ("pdserve.v1.Decode",)

    def __init__(self, settings: DecodeSettings, config: EngineConfig) -> None:
        self.core = DecodeCore()
        self._settings = settings
        self._config = config
        self._part: DecodeRuntime | None = None
        self._loop = asyncio.get_running_loop()

    def register(self, server: grpc.aio.Server) -> None:
        add_DecodeServicer_to_server(DecodeService(self.core), server)

    def build(self, boot: bytes, progress: Progress) -> DecodeRuntime:
        config = replace(self._config, threads=self._settings.threads)
        engine, card = build_engine(config, progress)
        core, loop = self.core, self._loop
        sink = Sink(
            step=on_loop(loop, core.on_step),
            received=on_loop(loop, core.on_received),
            lost=on_loop(loop, core.on_lost),
            verified=on_loop(loop, core.on_verified),
            attached=on_loop(loop, core.on_attached),
            again=on_loop(loop, core.on_again),
            departed=on_loop(loop, core.moving.on_departed),
        )
        leases = core.leases.figures
        self._part = DecodeRuntime(self._settings, engine, card, boot, sink, leases)
        return self._part

    def attach(self) -> None:
        assert self._part is not None  # built
        self.core.attach(self._part)

    async def drain(self) -> None:
        await self.core.drain()


async def serve(settings: DecodeSettings, config: EngineConfig, report: Report) -> int:
    return await serve_worker(settings, DecodeRole(settings, config), report)


def run(settings: DecodeSettings, engine: EngineConfig, report: Report = silent) -> int:
    """Serve until a signal; returns the exit code. Raises OSError if an address is taken, and
    what loading the model raises."""
    configure_logging("decode", settings.log_level)
    return asyncio.run(serve(settings, engine, report))
