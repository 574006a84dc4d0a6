"""The gateway process: builds its parts, hands them down, and ends in order.

Start-up waits for no other process: /health answers at once, /ready once a router has a decode
worker.
"""

import asyncio
import contextlib
import functools
import logging
import secrets
import socket
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import uvicorn
import uvloop

from pdserve.gateway.catalog import TextExecutor
from pdserve.gateway.grpc_text import SERVICE, TEXT_METHODS, TextServicer
from pdserve.gateway.http.app import create_app
from pdserve.gateway.http.dialect import Dialect, HttpLimits
from pdserve.gateway.http.protocol import BoundedProtocol
from pdserve.gateway.keys import ApiKeys, read_key_file
from pdserve.gateway.limits import AdmissionLimits
from pdserve.gateway.observability.metrics import GatewayMetrics
from pdserve.gateway.observability.readiness import Readiness
from pdserve.gateway.openai.dialect import OpenAiDialect
from pdserve.gateway.router_client.client import RouterClient
from pdserve.gateway.service import Service
from pdserve.gateway.settings import GatewaySettings
from pdserve.protos.text_pb2_grpc import add_TextServicer_to_server
from pdserve.services.host.backpressure import Backpressure
from pdserve.services.host.lifecycle import Report, run_until_signal, silent
from pdserve.services.host.logs import configure_logging
from pdserve.services.host.server import GrpcHost

log = logging.getLogger("pdserve.gateway")

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
READY_S = 1.0  # between two checks which models can be asked
START_S = 0.05  # until there is one
KEEP_ALIVE_S = 75  # longer than the minute after which common proxies drop an idle connection


def run(settings: GatewaySettings, report: Report = silent) -> int:
    """Serve until a signal; returns the exit code.

    Raises OSError naming a busy port or an unreadable key file, ValueError for settings that
    cannot work. Reports "listening" {"url", "grpc"} and "ready" {"models"}.
    """
    configure_logging("gateway", settings.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, report))


async def _serve(settings: GatewaySettings, report: Report) -> int:
    from_file = read_key_file(settings.api_key_file) if settings.api_key_file else ()
    keys = ApiKeys((*settings.api_keys, *from_file))
    client = RouterClient(settings.routers, settings.cluster_secret, secrets.token_bytes(16))
    listener = listen(settings.host, settings.port)
    executor = ThreadPoolExecutor(settings.text_threads, "text")
    limits = AdmissionLimits(settings.max_requests, settings.max_unanswered)
    service = Service(
        client,
        TextExecutor(executor, settings.text_timeout_s),
        limits,
        GatewayMetrics(),
        time.monotonic,
        settings.request_timeout_s,
        settings.queue_timeout_s,
    )
    readiness = Readiness(client, service.catalog)
    http_limits = HttpLimits(
        settings.max_body_bytes,
        settings.body_timeout_s,
        settings.max_buffer_bytes,
        settings.stall_timeout_s,
    )
    openai = OpenAiDialect(service, http_limits)
    app = create_app([openai], service, readiness, keys, open_metrics=not settings.metrics_key)
    http = HttpServer(app, openai)
    grpc_host = GrpcHost(
        _address(settings.host, settings.grpc_port),
        settings.cluster_secret,
        # Callers of Text show an API key, which the servicer checks.
        (*TEXT_METHODS, *(() if keys.required else (REFLECTION,))),
        (SERVICE,),
    )
    backpressure = Backpressure(settings.max_buffer_bytes, settings.stall_timeout_s)
    add_TextServicer_to_server(TextServicer(service, keys, backpressure), grpc_host.server)
    grpc_port = await grpc_host.start()
    session = await client.start()
    serving = asyncio.create_task(http.serve([listener]), name="http")
    port = listener.getsockname()[1]
    report(
        "listening",
        {
            "url": f"http://{_address(settings.host, port)}",
            "grpc": _address(settings.host, grpc_port),
        },
    )
    announcing = asyncio.create_task(_announce(readiness, grpc_host, report), name="announce")

    def set_serving(serving: bool) -> None:
        announcing.cancel()
        readiness.drain()
        grpc_host.set_serving(serving)

    async def drain() -> None:
        # A load balancer over several gateways learns from /ready that this one ends.
        await asyncio.sleep(min(settings.lame_duck_s, settings.drain_s))
        limits.close()
        await limits.idle.wait()

    async def stop(grace_s: float) -> None:
        http.should_exit = True
        http.config.timeout_graceful_shutdown = max(1, int(grace_s))
        await asyncio.gather(grpc_host.stop(grace_s), asyncio.wait({serving}, timeout=grace_s + 2))
        await client.close()
        executor.shutdown(wait=False, cancel_futures=True)

    return await run_until_signal(
        set_serving=set_serving,
        drain=drain,
        stop=stop,
        drain_s=settings.drain_s,
        failed=(serving, session, announcing),
    )


async def _announce(readiness: Readiness, grpc_host: GrpcHost, report: Report) -> None:
    """Report "ready" once, and keep the gRPC health at what /ready says."""
    announced = serving = False
    while True:
        models = await readiness.models()
        if bool(models) != serving:
            serving = bool(models)
            grpc_host.set_serving(serving)
        if serving and not announced:
            announced = True
            report("ready", {"models": models})
        await asyncio.sleep(READY_S if announced else START_S)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling, which is the process's own.

    `dialect` gives shape to the errors of what is no request.
    """

    def __init__(self, app: object, dialect: Dialect) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=functools.partial(BoundedProtocol, dialect=dialect),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",  # its start and end are in our own lines
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises OSError naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"cannot listen on {_address(host, port)}: {error.strerror}"
        ) from error
    listener.set_inheritable(False)
    return listener
