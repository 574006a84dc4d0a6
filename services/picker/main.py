"""The endpoint picker's process: builds its parts, serves, drains."""

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.main import make_text_limits
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.gateway.model_overrides import ModelOverrides, read_template_override
from pdserve.gateway.router_client import RouterClient
from pdserve.gateway.service import Records, ServiceOptions
from pdserve.gateway.settings import THINKING
from pdserve.protos.ext_proc_pb2_grpc import add_ExternalProcessorServicer_to_server
from pdserve.services.common import lifecycle
from pdserve.services.common.auth.access import make_access, make_tls
from pdserve.services.common.lifecycle import Report, run_until_signal, silent
from pdserve.services.common.logs import configure_logging
from pdserve.services.common.process import freeze_heap
from pdserve.services.common.rate_limits import RateLimits, RateSettings
from pdserve.services.common.server import GrpcServer
from pdserve.services.common.tenants import make_keys
from pdserve.services.common.tracing import NO_TRACER, Tracer, tracing
from pdserve.services.picker.endpoints import Endpoints
from pdserve.services.picker.picker import EndpointPicker, PickerMetrics
from pdserve.services.picker.prompts import PromptReader, PromptService
from pdserve.services.picker.servicer import Exchange, ExternalProcessorServicer, HeldBodies
from pdserve.services.picker.settings import PickerSettings
from pdserve.text import ParserChoice
from pdserve.text.workers import TokenizerPool

if TYPE_CHECKING:
    from pdserve.services.common.metrics import MetricsPort

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = f"/{SERVICE}/Process"
NAMES = ("readiness", SERVICE)  # of health checks in the protocol
LIVE = "liveness"
LOOK_S = 1.0  # between two looks for models, whose tokenizers are loaded ahead
LAME_DUCK_S = 2.0  # for proxies to notice a stop before new connections are refused


class PickerProcess:
    """A running picker without signal handling, which tests use too."""

    def __init__(self, settings: PickerSettings, tracer: Tracer = NO_TRACER) -> None:
        """Raises OSError for unreadable files, ValueError for settings that cannot work."""
        self._settings = settings
        self._keys = make_keys(settings)
        access = make_access(settings)
        self._tls = make_tls(settings.tls_cert, settings.tls_key)
        self.grpc_server = GrpcServer(
            access, (METHOD,), (SERVICE,), checked_names=NAMES, live_name=LIVE
        )  # callers are proxies, which have no certificate of the cluster
        self.metrics = PickerMetrics()
        self.client = RouterClient(settings.routers, access, secrets.token_bytes(16))
        self.endpoints = Endpoints(settings.endpoints, time.monotonic)
        rates = RateLimits(RateSettings())
        limit_s = settings.decide_timeout_s
        self._text_pool = TokenizerPool(
            make_text_limits(settings, settings.text_timeout_s),
            settings.text_processes,
            rates.text_spent,
            limit_s,
            settings.log_format,
        )
        self._service = PromptService(
            self.client,
            self._text_pool,
            AdmissionLimits(1, 1),  # no request is run
            rates,
            Records(GatewayMetrics(), time.monotonic),
            ServiceOptions(
                timeout_s=limit_s,
                queue_timeout_s=limit_s,
                template_kwargs=settings.template_kwargs,
                thinking=THINKING[settings.thinking],
                parsers=ParserChoice(settings.tool_parser, settings.reasoning_parser),
                overrides=ModelOverrides(template=read_template_override(settings)),
            ),
        )
        max_body_bytes, max_bodies_bytes = settings.max_body_bytes, settings.max_bodies_bytes
        self._prompts = PromptReader(
            self._service,
            HttpLimits(max_body_bytes, max_bodies_bytes, limit_s, max_body_bytes, limit_s),
        )
        self._bodies = HeldBodies(max_body_bytes, max_bodies_bytes)
        self._picker = EndpointPicker(
            self.endpoints,
            self.client,
            self._prompts,
            self._keys,
            self.metrics,
            time.monotonic,
            limit_s,
            settings.fallbacks,
            tracer,
        )
        self.address = ""
        self.watching: list[asyncio.Task[None]] = []

    def _exchange(self) -> Exchange:
        return Exchange(
            self._picker, self._prompts.error, self._bodies, self._settings.conformance_headers
        )

    async def start(self) -> None:
        """Listen. Raises OSError if an address is taken."""
        bind = self._settings.bind
        servicer = ExternalProcessorServicer(self._exchange, self.metrics)
        add_ExternalProcessorServicer_to_server(servicer, self.grpc_server.server)
        self.address = (
            f"{bind.rpartition(':')[0]}:{self.grpc_server.listen_for_clients(bind, self._tls)}"
        )
        self.grpc_server.listen_for_probes(bind, self._settings.probe_port)
        self._text_pool.prepare()
        await self.grpc_server.start()
        self.watching = [
            await self.client.start(),
            asyncio.create_task(self.endpoints.keep(), name="endpoints"),
            asyncio.create_task(self._keys.watch(), name="keys"),
            asyncio.create_task(self._load_ahead(), name="models"),
            asyncio.create_task(self._announce(), name="announce"),
        ]

    async def _load_ahead(self) -> None:
        """Load tokenizers of new models, so that no request waits for one."""
        while True:
            await self._prompts.readiness.models()
            await asyncio.sleep(LOOK_S)

    async def _announce(self) -> None:
        """Report SERVING once the endpoints are known; routers may connect later."""
        await self.endpoints.ready_known.wait()
        freeze_heap()
        self.grpc_server.set_serving(True)
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Let streams continue until their responses have ended; new ones go to other pickers."""
        await asyncio.sleep(min(LAME_DUCK_S, self._settings.drain_s))
        await self.grpc_server.server.stop(self._settings.drain_s)

    async def stop(self, grace_s: float) -> None:
        for task in self.watching:
            task.cancel()
        await self.grpc_server.stop(grace_s)
        await self.client.close()
        await self._service.catalog.close()


async def serve(settings: PickerSettings, report: Report, tracer: Tracer = NO_TRACER) -> int:
    picker = PickerProcess(settings, tracer)
    await picker.start()
    metrics = _serve_metrics(picker, settings)
    report("listening", {"address": picker.address})

    def set_serving(serving: bool) -> None:
        for task in picker.watching:
            if task.get_name() == "announce":
                task.cancel()
        picker.grpc_server.set_serving(serving)

    try:
        return await run_until_signal(
            set_serving=set_serving,
            drain=picker.drain,
            stop=picker.stop,
            drain_s=settings.drain_s,
            failed=[task for task in picker.watching if task.get_name() != "announce"],
        )
    finally:
        if metrics is not None:
            await metrics.close()


def _serve_metrics(picker: PickerProcess, settings: PickerSettings) -> "MetricsPort | None":
    if not settings.metrics_port:
        return None
    from pdserve.services.common.metrics import MetricsPort

    return MetricsPort(settings, settings.bind, settings.tls_cert, picker.metrics)


def run(settings: PickerSettings, report: Report = silent) -> int:
    """Serve until a signal. Returns the exit code. Raises OSError if the address is taken, and
    ValueError for settings that cannot work."""
    configure_logging("picker", settings.log_level, log_format=settings.log_format)
    with tracing("picker", settings) as tracer:
        return lifecycle.run(serve(settings, report, tracer))
