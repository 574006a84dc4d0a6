"""The endpoint picker's process: its gRPC service, and how its parts are built, serve and drain."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc.aio

from pdserve.gateway import AdmissionLimits, Records, ServiceOptions, make_text_limits
from pdserve.gateway.http import HttpLimits
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.gateway.router_client import RouterClient
from pdserve.protos import ext_proc_pb2 as pb
from pdserve.protos.ext_proc_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)
from pdserve.services.common import lifecycle
from pdserve.services.common.auth import make_access, make_tls
from pdserve.services.common.lifecycle import Report, run_until_signal, silent
from pdserve.services.common.logs import configure_logging
from pdserve.services.common.process import freeze_heap
from pdserve.services.common.server import GrpcHost
from pdserve.services.common.tenants import RateLimits, RateSettings, make_keys
from pdserve.services.common.tracing import NO_TRACER, Tracer, tracing
from pdserve.services.picker.endpoints import Endpoints
from pdserve.services.picker.exchange import Exchange, HeldBodies
from pdserve.services.picker.metrics import PickerMetrics
from pdserve.services.picker.picker import EndpointPicker
from pdserve.services.picker.prompts import PromptReader, PromptService
from pdserve.services.picker.settings import PickerSettings
from pdserve.text import ParserChoice
from pdserve.text.processes import TextPool

if TYPE_CHECKING:
    from pdserve.services.common.metrics.process_metrics import MetricsPort

log = logging.getLogger("pdserve.picker")
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = f"/{SERVICE}/Process"
Context = grpc.aio.ServicerContext[Any, Any]
NAMES = ("readiness", SERVICE)  # of health checks in the protocol
LIVE = "liveness"
LOOK_S = 1.0  # between two looks for models, whose tokenizers are loaded ahead
LAME_DUCK_S = 2.0  # for proxies to notice a stop before new connections are refused


class PickerServicer(ExternalProcessorServicer):
    """Serves ext_proc; `exchange` makes an Exchange."""

    def __init__(self, exchange: Callable[[], Exchange], metrics: PickerMetrics) -> None:
        self._exchange = exchange
        self._metrics = metrics

    async def Process(
        self, request_iterator: AsyncIterator[pb.ProcessingRequest], context: Context
    ) -> AsyncIterator[pb.ProcessingResponse]:
        """Serve one HTTP request until its proxy's stream ends. An exception here ends the stream
        with an error, and the Gateway's failure mode decides what happens to the request."""
        exchange = self._exchange()
        try:
            async for message in request_iterator:
                for response in await exchange.take(message):
                    yield response
        except Exception:
            self._metrics.failed()
            log.exception("a proxy's stream failed")
            raise
        finally:
            exchange.close()


class PickerProcess:
    """A running picker; tests use it without signals."""

    def __init__(self, settings: PickerSettings, tracer: Tracer = NO_TRACER) -> None:
        """Raises OSError for unreadable files, ValueError for settings that cannot work."""
        self._settings = settings
        self._keys = make_keys(settings)
        access = make_access(settings)
        self._tls = make_tls(settings.tls_cert, settings.tls_key)
        self.host = GrpcHost(
            access, (METHOD,), (SERVICE,), checked_names=NAMES, live_name=LIVE
        )  # callers are proxies, which have no certificate of the cluster
        self.metrics = PickerMetrics()
        self.client = RouterClient(settings.routers, access, secrets.token_bytes(16))
        self.endpoints = Endpoints(settings.endpoints, time.monotonic)
        rates = RateLimits(RateSettings())
        limit_s = settings.decide_timeout_s
        self._text_pool = TextPool(
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
                limit_s,
                limit_s,
                settings.template_kwargs,
                ParserChoice(settings.tool_parser, settings.reasoning_parser),
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
        servicer = PickerServicer(self._exchange, self.metrics)
        add_ExternalProcessorServicer_to_server(servicer, self.host.server)
        self.address = f"{bind.rpartition(':')[0]}:{self.host.listen_for_clients(bind, self._tls)}"
        self.host.listen_for_probes(bind, self._settings.probe_port)
        self._text_pool.prepare()
        await self.host.start()
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
        self.host.set_serving(True)
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Let streams go on until their responses have ended; new ones go to other pickers."""
        await asyncio.sleep(min(LAME_DUCK_S, self._settings.drain_s))
        await self.host.server.stop(self._settings.drain_s)

    async def stop(self, grace_s: float) -> None:
        for task in self.watching:
            task.cancel()
        await self.host.stop(grace_s)
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
        picker.host.set_serving(serving)

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
    from pdserve.services.common.metrics.process_metrics import MetricsPort

    return MetricsPort(settings, settings.bind, settings.tls_cert, picker.metrics)


def run(settings: PickerSettings, report: Report = silent) -> int:
    """Serve until a signal. Returns the exit code. Raises OSError if the address is taken, and
    ValueError for settings that cannot work."""
    configure_logging("picker", settings.log_level, log_format=settings.log_format)
    with tracing("picker", settings) as tracer:
        return lifecycle.run(serve(settings, report, tracer))
