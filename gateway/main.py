"""The gateway process: builds its parts, hands them down, and shuts them down in order.

Start-up waits for no other process: /health answers at once, /ready once a router has a decode
worker.
"""

import asyncio
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.anthropic import AnthropicApi
from pdserve.gateway.grpc_api import SERVICE, TEXT_METHODS, KeyInterceptor, TextServicer
from pdserve.gateway.http.api import HttpApi, HttpLimits
from pdserve.gateway.http.app import create_app, create_routes
from pdserve.gateway.http.body import MAX_VALUES, VALUE_BYTES, BodyReader
from pdserve.gateway.http.guard import is_loopback
from pdserve.gateway.http.serving import HttpServer
from pdserve.gateway.listener import ConnectionCounts, host_port, listen, unix_listener
from pdserve.gateway.mcp import McpServers, McpTools, read_config
from pdserve.gateway.metrics import GatewayMetrics, GatewayProcesses, uncounted
from pdserve.gateway.ollama import OllamaApi
from pdserve.gateway.openai import OpenAiApi
from pdserve.gateway.openai.stored import LateParts
from pdserve.gateway.readiness import Readiness
from pdserve.gateway.rerank import RerankApi
from pdserve.gateway.router_client import RouterClient
from pdserve.gateway.service import Service
from pdserve.gateway.settings import (
    NO_DATABASE,
    GatewaySettings,
    GatewayWorker,
    PromptSettings,
    worker_name,
)
from pdserve.gateway.web import add_fleet, add_pages
from pdserve.protos.text_pb2_grpc import add_TextServicer_to_server
from pdserve.services.common import lifecycle
from pdserve.services.common.auth.access import make_access, make_tls
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
    cannot work. Reports "listening" {"url", "grpc"} and "ready" {"models"}.
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
    keys = make_keys(settings)
    access = make_access(settings)
    tls = make_tls(settings.tls_cert, settings.tls_key)
    limits = AdmissionLimits(settings.max_requests, settings.max_unanswered)
    stored = make_stored(settings, keys, limits)
    client = RouterClient(settings.routers, access, secrets.token_bytes(16))
    listener = worker.listener if worker else listen(settings.host, settings.port)
    rates = make_rate_limits(settings, settings.text_seconds_per_minute)
    text_pool = TokenizerPool(
        make_text_limits(settings, settings.grammar_timeout_s),
        settings.text_processes,
        rates.text_spent,
        settings.queue_timeout_s,
        settings.log_format,
    )
    text_pool.prepare()
    if worker:
        metrics = GatewayMetrics(worker.metrics_folder, worker.index)
        counts = ConnectionCounts(worker.counts_file, worker.index, worker.num)
        processes = GatewayProcesses(Path(worker.folder), worker.index, worker.num)
        limits.on_change = lambda: metrics.show_open(limits)
    else:
        metrics, counts, processes = GatewayMetrics(), None, GatewayProcesses()
    metrics.add_process(certificates_of(settings, settings.tls_cert))
    mcp = make_mcp(settings, metrics)
    service = Service(
        client,
        text_pool,
        limits,
        rates,
        metrics,
        time.monotonic,
        settings.request_timeout_s,
        settings.queue_timeout_s,
        settings.template_kwargs,
        ParserChoice(settings.tool_parser, settings.reasoning_parser),
        stored.count if stored else uncounted,
        None if mcp is None else McpTools(mcp, settings.mcp_max_rounds, time.monotonic),
        tracer,
        processes,
        settings.strict_max_tokens,
        settings.aliases,
        settings.any_model,
    )
    readiness = Readiness(client, service.catalog)
    http_limits = HttpLimits(
        settings.max_body_bytes,
        settings.max_bodies_bytes,
        settings.body_timeout_s,
        settings.max_buffer_bytes,
        settings.stall_timeout_s,
    )
    bodies = BodyReader(http_limits)
    openai = OpenAiApi(
        service,
        http_limits,
        bodies,
        responses=stored,
        stored=stored,
    )
    apis: list[HttpApi] = [
        AnthropicApi(service, http_limits, bodies),
        RerankApi(service, bodies),
        OllamaApi(service, http_limits, bodies),
        openai,
    ]
    routes = create_routes(apis, service, readiness, settings.fleet_metrics)
    add_fleet(routes, service)
    open_paths = add_pages(routes, settings.root_path)
    app = create_app(
        apis,
        service,
        readiness,
        keys,
        settings.open_metrics,
        local=is_loopback(settings.host),
        allowed_origins=settings.allow_origins,
        routes=routes,
        root_path=settings.root_path,
        open_paths=open_paths,
    )
    http = HttpServer(
        app,
        openai,
        settings.stall_timeout_s,
        settings.tls_cert,
        settings.tls_key,
        settings.max_answers_bytes,
        counts,
    )
    grpc_host = GrpcServer(
        access,
        # Callers of Text authenticate with an API key instead.
        (*TEXT_METHODS, *(() if keys.required else (REFLECTION,))),
        (SERVICE,),
        interceptors=(KeyInterceptor(keys),),
        shared_port=worker is not None,
    )
    backpressure = Backpressure(settings.max_buffer_bytes, settings.stall_timeout_s)
    text = TextServicer(service, keys, backpressure, settings.max_bodies_bytes)
    add_TextServicer_to_server(text, grpc_host.server)
    grpc_bind = host_port(settings.host, settings.grpc_port)
    grpc_port = grpc_host.listen_for_clients(grpc_bind, tls)
    await grpc_host.start()
    await processes.start()
    session = await client.start()
    if mcp is not None:
        mcp.start()
    serving = asyncio.create_task(http.serve([listener, *((unix,) if unix else ())]), name="http")
    port = listener.getsockname()[1]
    report(
        "listening",
        {
            "url": f"{'http' if tls is None else 'https'}://{host_port(settings.host, port)}",
            "grpc": host_port(settings.host, grpc_port),
            **({"unix": settings.unix_socket} if unix else {}),
        },
    )
    watching = [
        asyncio.create_task(keys.watch(), name="keys"),
        asyncio.create_task(http.watch_certificate(), name="certificate"),
        asyncio.create_task(watch_loop(metrics.loop_lag.observe), name="event loop lag"),
    ]
    if stored:
        watching.append(asyncio.create_task(stored.run(routes), name="stored"))

    def announced(models: list[str]) -> None:
        report("ready", {"models": models})
        if counts:
            counts.set_ready()
        if stored:
            stored.request()

    announcing = asyncio.create_task(_announce(readiness, grpc_host, announced), name="announce")

    def set_serving(serving: bool) -> None:
        announcing.cancel()
        readiness.drain()
        grpc_host.set_serving(serving)

    async def drain() -> None:
        await asyncio.gather(drain_clients(), *([stored.drain()] if stored else []))

    async def drain_clients() -> None:
        # A load balancer over several gateways learns from /ready that this one is ending.
        await asyncio.sleep(min(settings.lame_duck_s, settings.drain_s))
        limits.close()
        await limits.idle.wait()

    async def stop(grace_s: float) -> None:
        for task in watching:
            task.cancel()
        http.should_exit = True
        http.config.timeout_graceful_shutdown = math.ceil(grace_s)
        await asyncio.gather(
            grpc_host.stop(grace_s),
            asyncio.wait({serving}, timeout=grace_s + 2),
            *(() if mcp is None else (mcp.close(),)),
        )
        if stored:
            await stored.close()
        await client.close()
        await service.catalog.close()
        await rates.close()
        await processes.close()

    return await run_until_signal(
        set_serving=set_serving,
        drain=drain,
        stop=stop,
        drain_s=settings.drain_s,
        failed=(serving, session, announcing, *watching),
    )


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


async def _announce(
    readiness: Readiness, grpc_host: GrpcServer, on_ready: Callable[[list[str]], None]
) -> None:
    """Call `on_ready` once, and keep the gRPC health in step with /ready."""
    announced = serving = False
    while True:
        models = await readiness.models()
        if models and not announced:
            freeze_heap()
        if bool(models) != serving:
            serving = bool(models)
            grpc_host.set_serving(serving)
        if serving and not announced:
            announced = True
            on_ready(models)
        await asyncio.sleep(READY_S if announced else START_S)
