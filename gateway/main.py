"""The gateway process: builds its parts, hands them down, and shuts them down in order.

Start-up waits for no other process: /health answers at once, /ready once a router has a decode
worker.
"""

import asyncio
import logging
import math
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdserve.gateway.admin_key import AdminKey
from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.anthropic import AnthropicApi
from pdserve.gateway.grpc_api import SERVICE, TEXT_METHODS, KeyInterceptor, TextServicer
from pdserve.gateway.http.admin import ADMIN_PATHS, add_admin
from pdserve.gateway.http.api import HttpApi, HttpLimits
from pdserve.gateway.http.app import create_app, create_routes
from pdserve.gateway.http.body import MAX_VALUES, VALUE_BYTES, BodyReader
from pdserve.gateway.http.guard import is_loopback
from pdserve.gateway.http.serving import HttpServer
from pdserve.gateway.listener import ConnectionCounts, host_port, listen, unix_listener
from pdserve.gateway.mcp import McpServers, McpTools, read_config
from pdserve.gateway.metrics import GatewayMetrics, GatewayProcesses, uncounted
from pdserve.gateway.model_overrides import read_overrides
from pdserve.gateway.ollama import OllamaApi
from pdserve.gateway.openai import OpenAiApi
from pdserve.gateway.openai.stored import LateParts
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.rerank import RerankApi
from pdserve.gateway.router_client import RouterClient
from pdserve.gateway.service import Records, Service, ServiceOptions
from pdserve.gateway.settings import (
    NO_DATABASE,
    THINKING,
    GatewaySettings,
    GatewayWorker,
    PromptSettings,
    worker_name,
)
from pdserve.gateway.web import add_fleet, add_pages
from pdserve.protos.text_pb2_grpc import add_TextServicer_to_server
from pdserve.services.common import lifecycle
from pdserve.services.common.auth.access import Access, make_access, make_tls
from pdserve.services.common.lifecycle import Report, run_until_signal, silent
from pdserve.services.common.logs import configure_logging
from pdserve.services.common.metrics import certificates_of, watch_loop
from pdserve.services.common.process import freeze_heap
from pdserve.services.common.rate_limits import make_rate_limits
from pdserve.services.common.rpc import Backpressure
from pdserve.services.common.server import GrpcServer
from pdserve.services.common.tenants import ApiKeys, make_keys
from pdserve.services.common.tracing import Tracer, tracing
from pdserve.text import ParserChoice
from pdserve.text.workers import TokenizerPool, WorkerLimits

log = logging.getLogger("pdserve.gateway")

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
READY_S = 1.0  # between readiness checks
START_S = 0.05  # between checks before the first model is ready
LOAD_S = 60.0  # to load a model's tokenizer and template
RENDER_S = 1.5  # of processor time to render a chat template


def run(settings: GatewaySettings, report: Report = silent) -> int:
    """Serve until a signal; returns the exit code.

    Raises OSError naming a busy port or an unreadable key file, ValueError for settings that
    cannot work. Reports "listening" {"url", "grpc"}, "ready" {"models"}, and "shutdown" {} if a
    client with the admin key ends the server; without a reader of reports the process then ends.
    """
    configure_logging("gateway", settings.log_level, log_format=settings.log_format)
    with (
        tracing("gateway", settings) as tracer,
        unix_listener(settings.unix_socket) as unix,
    ):
        return lifecycle.run(_serve(settings, report, unix, tracer))


def run_worker(settings: GatewaySettings, worker: GatewayWorker, report: Report = silent) -> int:
    """Serve like `run`, as one of several processes, each with its share of the bounds."""
    name = worker_name(worker.index)
    configure_logging(name, settings.log_level, log_format=settings.log_format)
    try:
        with tracing("gateway", settings, worker.trace_key) as tracer:
            part = divided(settings, worker.num)
            return lifecycle.run(_serve(part, report, worker.unix, tracer, worker))
    except ValueError as error:  # about settings, so its text is for users
        report("failed", {"message": str(error)})
        return 1


def divided(settings: GatewaySettings, num: int) -> GatewaySettings:
    """Return the settings of one of `num` processes: bounds over all clients are divided, but each
    process keeps what one request needs."""

    def part(total: int, minimum: int = 1) -> int:
        return min(total, max(total // num, minimum))

    return replace(
        settings,
        max_requests=part(settings.max_requests),
        max_unanswered=part(settings.max_unanswered),
        max_bodies_bytes=part(
            settings.max_bodies_bytes, settings.max_body_bytes + MAX_VALUES * VALUE_BYTES
        ),
        max_answers_bytes=part(settings.max_answers_bytes),
        batch_concurrency=part(settings.batch_concurrency),
        text_processes=part(settings.text_processes),
    )


async def _serve(
    settings: GatewaySettings,
    report: Report,
    unix: socket.socket | None,
    tracer: Tracer,
    worker: GatewayWorker | None = None,
) -> int:
    gateway = GatewayProcess(settings, report, tracer, worker)
    failed = await gateway.start(unix)
    return await run_until_signal(
        set_serving=gateway.set_serving,
        drain=gateway.drain,
        stop=gateway.stop,
        drain_s=settings.drain_s,
        failed=failed,
    )


class GatewayProcess:
    """The parts of a gateway. They are built in the order in which they need each other, and ended
    by `set_serving`, `drain` and `stop`."""

    def __init__(
        self,
        settings: GatewaySettings,
        report: Report,
        tracer: Tracer,
        worker: GatewayWorker | None,
    ) -> None:
        """Build the parts and bind the HTTP port. Call within the running loop. Raises OSError,
        ValueError."""
        self._settings = settings
        self._report = report
        self._worker = worker
        self._keys = make_keys(settings)
        admin_key = settings.admin_api_key
        self._admin_key = AdminKey(admin_key, self._keys) if admin_key else None
        access = make_access(settings)
        self._tls = make_tls(settings.tls_cert, settings.tls_key)
        self._limits = AdmissionLimits(settings.max_requests, settings.max_unanswered)
        self._stored = make_stored(settings, self._keys, self._limits)
        self._client = RouterClient(settings.routers, access, secrets.token_bytes(16))
        self._listener = worker.listener if worker else listen(settings.host, settings.port)
        self._rates = make_rate_limits(settings, settings.text_seconds_per_minute)
        self._metrics, self._counts, self._processes = self._make_records()
        self._mcp = make_mcp(settings, self._metrics)
        self._service = self._make_service(tracer)
        self._readiness = Readiness(self._client, self._service.catalog)
        self._http = self._make_http()
        self._grpc = self._make_grpc(access)
        # `start` creates the tasks. They end only by a failure, or when cancelled.
        self._serving: asyncio.Task[None]
        self._announcing: asyncio.Task[None]
        self._tasks: list[asyncio.Task[None]] = []

    def _make_records(self) -> tuple[GatewayMetrics, ConnectionCounts | None, GatewayProcesses]:
        """Make what the gateway's processes share: in their common folder if there are several."""
        counts, worker, limits = None, self._worker, self._limits
        if worker:
            metrics = GatewayMetrics(worker.metrics_folder, worker.index)
            counts = ConnectionCounts(worker.counts_file, worker.index, worker.num)
            processes = GatewayProcesses(Path(worker.folder), worker.index, worker.num)
            limits.on_change = lambda: metrics.show_open(limits)
        else:
            metrics, processes = GatewayMetrics(), GatewayProcesses()
        metrics.add_process(certificates_of(self._settings, self._settings.tls_cert))
        return metrics, counts, processes

    def _make_service(self, tracer: Tracer) -> Service:
        settings, mcp = self._settings, self._mcp
        text_pool = TokenizerPool(
            make_text_limits(settings, settings.grammar_timeout_s),
            settings.text_processes,
            self._rates.text_spent,
            settings.queue_timeout_s,
            settings.log_format,
        )
        text_pool.prepare()
        count_usage = self._stored.count if self._stored else uncounted
        return Service(
            self._client,
            text_pool,
            self._limits,
            self._rates,
            Records(self._metrics, time.monotonic, count_usage, tracer, self._processes),
            ServiceOptions(
                timeout_s=settings.request_timeout_s,
                queue_timeout_s=settings.queue_timeout_s,
                template_kwargs=settings.template_kwargs,
                thinking=THINKING[settings.thinking],
                parsers=ParserChoice(settings.tool_parser, settings.reasoning_parser),
                strict_max_tokens=settings.strict_max_tokens,
                aliases=settings.aliases,
                any_model=settings.any_model,
                overrides=read_overrides(settings),
                server_tools=(
                    None if mcp is None else McpTools(mcp, settings.mcp_max_rounds, time.monotonic)
                ),
            ),
        )

    def _make_http(self) -> HttpServer:
        settings, service, stored = self._settings, self._service, self._stored
        limits = HttpLimits(
            settings.max_body_bytes,
            settings.max_bodies_bytes,
            settings.body_timeout_s,
            settings.max_buffer_bytes,
            settings.stall_timeout_s,
        )
        bodies = BodyReader(limits)
        openai = OpenAiApi(service, limits, bodies, responses=stored, stored=stored)
        apis: list[HttpApi] = [
            AnthropicApi(service, limits, bodies),
            RerankApi(service, bodies),
            OllamaApi(service, limits, bodies),
            openai,
        ]
        self._routes = create_routes(apis, service, self._readiness, settings.fleet_metrics)
        add_fleet(self._routes, service)
        open_paths = [*add_pages(self._routes, settings.root_path)]
        if self._admin_key is not None:
            add_admin(self._routes, self._admin_key, self._shut_down)
            open_paths += ADMIN_PATHS
        app = create_app(
            apis,
            service,
            self._readiness,
            self._keys,
            settings.open_metrics,
            local=is_loopback(settings.host),
            allowed_origins=settings.allow_origins,
            routes=self._routes,
            root_path=settings.root_path,
            open_paths=open_paths,
        )
        return HttpServer(
            app,
            openai,
            settings.stall_timeout_s,
            settings.tls_cert,
            settings.tls_key,
            settings.max_answers_bytes,
            self._counts,
        )

    def _make_grpc(self, access: Access) -> GrpcServer:
        settings, keys = self._settings, self._keys
        host = GrpcServer(
            access,
            # Callers of Text authenticate with an API key instead.
            (*TEXT_METHODS, *(() if keys.required else (REFLECTION,))),
            (SERVICE,),
            interceptors=(KeyInterceptor(keys),),
            shared_port=self._worker is not None,
        )
        backpressure = Backpressure(settings.max_buffer_bytes, settings.stall_timeout_s)
        text = TextServicer(self._service, keys, backpressure, settings.max_bodies_bytes)
        add_TextServicer_to_server(text, host.server)
        return host

    async def start(self, unix: socket.socket | None) -> "Sequence[asyncio.Future[Any]]":
        """Serve; return what ends only by a failure. Raises OSError for a busy gRPC port."""
        settings = self._settings
        grpc_bind = host_port(settings.host, settings.grpc_port)
        grpc_port = self._grpc.listen_for_clients(grpc_bind, self._tls)
        await self._grpc.start()
        await self._processes.start()
        session = await self._client.start()
        if self._mcp is not None:
            self._mcp.start()
        listeners = [self._listener, *((unix,) if unix else ())]
        self._serving = asyncio.create_task(self._http.serve(listeners), name="http")
        scheme, port = "http" if self._tls is None else "https", self._listener.getsockname()[1]
        figures = {
            "url": f"{scheme}://{host_port(settings.host, port)}",
            "grpc": host_port(settings.host, grpc_port),
        }
        self._report("listening", figures | ({"unix": settings.unix_socket} if unix else {}))
        self._tasks = [
            asyncio.create_task(self._keys.watch(), name="keys"),
            asyncio.create_task(self._http.watch_certificate(), name="certificate"),
            asyncio.create_task(watch_loop(self._metrics.loop_lag.observe), name="event loop lag"),
        ]
        if self._stored:
            self._tasks.append(asyncio.create_task(self._stored.run(self._routes), name="stored"))
        self._announcing = asyncio.create_task(self._announce(), name="announce")
        return self._serving, session, self._announcing, *self._tasks

    async def _announce(self) -> None:
        """Report "ready" once, and keep the gRPC health in step with /ready."""
        announced = serving = False
        while True:
            models = await self._readiness.models()
            if models and not announced:
                freeze_heap()
            if bool(models) != serving:
                serving = bool(models)
                self._grpc.set_serving(serving)
            if serving and not announced:
                announced = True
                self._report("ready", {"models": models})
                if self._counts:
                    self._counts.set_ready()
                if self._stored:
                    self._stored.request()
            await asyncio.sleep(READY_S if announced else START_S)

    def _shut_down(self) -> None:
        """Drain and end the server as SIGTERM does, unless it drains already. A parent that reads
        the reports ends all processes in order; without one, this process signals itself."""
        if self._readiness.draining:
            return
        if self._report is silent:
            signal.raise_signal(signal.SIGTERM)
        else:
            self._report("shutdown", {})

    def set_serving(self, serving: bool) -> None:
        """Refuse requests from load balancers: /ready and the gRPC health fail from now on."""
        self._announcing.cancel()
        self._readiness.drain()
        self._grpc.set_serving(serving)

    async def drain(self) -> None:
        """Wait until no request runs."""
        stored = [self._stored.drain()] if self._stored else []
        await asyncio.gather(self._drain_clients(), *stored)

    async def _drain_clients(self) -> None:
        # A load balancer over several gateways learns from /ready that this one is ending.
        await asyncio.sleep(min(self._settings.lame_duck_s, self._settings.drain_s))
        self._limits.close()
        await self._limits.idle.wait()

    async def stop(self, grace_s: float) -> None:
        """Close the servers within `grace_s` seconds, then the other parts."""
        for task in self._tasks:
            task.cancel()
        self._http.should_exit = True
        self._http.config.timeout_graceful_shutdown = math.ceil(grace_s)
        await asyncio.gather(
            self._grpc.stop(grace_s),
            asyncio.wait({self._serving}, timeout=grace_s + 2),
            *(() if self._mcp is None else (self._mcp.close(),)),
        )
        if self._stored:
            await self._stored.close()
        await self._client.close()
        await self._service.catalog.close()
        await self._rates.close()
        await self._processes.close()


def make_stored(
    settings: GatewaySettings, keys: ApiKeys, limits: AdmissionLimits
) -> LateParts | None:
    """Return None without a database. Raises ValueError for an invalid URL, and OSError."""
    if settings.database_url in ("", NO_DATABASE):
        return None
    return LateParts(settings, keys, limits, freeze_heap)  # again, once SQLAlchemy is imported


def make_mcp(settings: GatewaySettings, metrics: GatewayMetrics) -> McpServers | None:
    """Return None without a config. Raises ValueError for a file that cannot be used."""
    if not settings.mcp_config:
        return None
    return McpServers(read_config(settings.mcp_config), metrics.mcp_calls)


def make_text_limits(settings: PromptSettings, grammar_s: float) -> WorkerLimits:
    """Return what a tokenizer worker may use, in seconds and bytes."""
    return WorkerLimits(
        load_s=LOAD_S,
        load_bytes=settings.text_load_memory_mb << 20,
        render_s=min(RENDER_S, settings.text_timeout_s),
        prompt_s=settings.text_timeout_s,
        prompt_bytes=settings.text_memory_mb << 20,
        late_s=2 * settings.text_timeout_s,
        grammar_s=grammar_s,
    )
