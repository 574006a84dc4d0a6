"""What every process serves: gRPC (secret, limits, keepalive, health, reflection) and its metrics.

Each server binds to the given address only, and a gRPC peer without the secret reaches no handler.
"""

import asyncio
import hmac
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.protos import common_pb2
from pdserve.services.host.channel import AUTHORIZATION, LIMITS
from pdserve.services.host.errors import ServiceError, abort
from pdserve.services.host.options import STOP_S

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

HEALTH_CHECK = "/grpc.health.v1.Health/Check"  # probes carry no secret

_SERVER_OPTIONS = [
    *LIMITS,
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_metadata_size", 16 << 10),
]


def is_authorized(metadata: Iterable[tuple[str, str | bytes]], secrets: Iterable[str]) -> bool:
    """Whether call metadata carries one of the secrets; compares all in constant time."""
    given = b""
    for key, value in metadata:
        if key == AUTHORIZATION:
            given = value if isinstance(value, bytes) else value.encode()
    matches = [hmac.compare_digest(given, f"Bearer {secret}".encode()) for secret in secrets]
    return any(matches)


async def _deny(_: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    error = ServiceError(common_pb2.UNAUTHENTICATED, "missing or wrong cluster secret")
    await abort(context, error)


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED before a byte of the request is read."""

    def __init__(self, secret: str, open_methods: Iterable[str]) -> None:
        self._secret = secret
        self._open = frozenset(open_methods)
        # A streaming handler, since a unary one would first wait for the peer's message.
        self._denial: Any = grpc.stream_stream_rpc_method_handler(_deny)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        if details.method in self._open or is_authorized(
            details.invocation_metadata or (), (self._secret,)
        ):
            return await continuation(handler_call_details)
        return self._denial


class GrpcHost:
    """A grpc.aio server; construct it inside the running loop, add servicers, then start.

    `open_methods` ("/pdserve.v1.Text/Chat") skip the secret: their servicer checks the caller
    itself. `services` are the full names that reflection lists. Health is NOT_SERVING until
    `set_serving(True)`. Raises ValueError on an empty secret.
    """

    def __init__(
        self,
        bind: str,
        secret: str,
        open_methods: Iterable[str] = (),
        services: Iterable[str] = (),
    ) -> None:
        if not secret:
            raise ValueError("cluster_secret is empty: every internal hop needs one")
        self._bind = bind
        self._health = health.aio.HealthServicer()
        self._updates: set[asyncio.Task[None]] = set()  # the loop keeps weak references only
        interceptor = SecretInterceptor(secret, (HEALTH_CHECK, *open_methods))
        self.server = grpc.aio.server(interceptors=[interceptor], options=_SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)

    async def start(self) -> int:
        """Listen; returns the port. Raises OSError, naming the address, if it is taken."""
        try:
            port = self.server.add_insecure_port(self._bind)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._bind}: {error}") from error
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.server.start()
        return port

    def set_serving(self, serving: bool) -> None:
        """What health checks answer from the next turn of the loop on; call after `start`."""
        status = health_pb2.HealthCheckResponse
        task = asyncio.get_running_loop().create_task(
            self._health.set("", status.SERVING if serving else status.NOT_SERVING)
        )
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s`, then cut them. Returns at most STOP_S
        later, even if gRPC has not stopped by then."""
        try:
            async with asyncio.timeout(grace_s + STOP_S):
                await self.server.stop(grace_s)
        except TimeoutError:
            log.warning("%s: gRPC has not stopped after %g s", self._bind, grace_s + STOP_S)


class MetricsHttp:
    """Serves GET /metrics of one collector from a daemon thread until closed, for processes without
    a web server. It listens on the host of `bind` (host:port); port 0 picks a free one."""

    def __init__(self, collector: "Collector", port: int, bind: str = "127.0.0.1:0") -> None:
        # Few processes have a metrics port, and its imports take 50 ms.
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(collector)
        self._server: WSGIServer
        self._thread: threading.Thread
        self._server, self._thread = start_http_server(
            port, bind.rpartition(":")[0].strip("[]"), registry
        )
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
