"""The gRPC server that every process uses, with authentication of callers, limits, keepalive,
health checks and reflection.

Each server listens only at the addresses that its owner adds.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.services.common.auth.access import Access, TlsFiles
from pdserve.services.common.options import STOP_S
from pdserve.services.common.rpc import MESSAGE_LIMITS, MalformedInterceptor

log = logging.getLogger(__name__)

HEALTH_CHECK = "/grpc.health.v1.Health/Check"  # probes have no credentials

MAX_CONNECTIONS = 1000  # to one port; more are closed at once
_SERVER_OPTIONS = [
    *MESSAGE_LIMITS,
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.server_handshake_timeout_ms", 15_000),  # for a peer that connects and sends nothing
    ("grpc.max_concurrent_streams", 100),  # of one connection; more wait at the caller
]
_PROBE_OPTIONS = {
    "grpc.max_receive_message_length": 1 << 10,
    "grpc.max_concurrent_streams": 10,
    "grpc.max_allowed_incoming_connections": 100,
}


class GrpcServer:
    """A grpc.aio server. Construct it inside the running loop, add servicers and ports, then start
    it.

    `open_methods` ("/pdserve.v1.Text/Chat") are for callers from outside the cluster: their
    servicer authenticates the caller. `services` are the full names of the services that reflection
    lists. `interceptors` run before a call's message is read. With `shared_port`, other processes
    of this user may listen on the same ports; the kernel assigns each new connection to one of
    them. Health checks return NOT_SERVING until `set_serving(True)`; those of the names in
    `checked_names` return the status of the whole server, and those of `live_name` always return
    SERVING.
    """

    def __init__(
        self,
        access: Access,
        open_methods: Collection[str] = (),
        services: Iterable[str] = (),
        max_connections: int = MAX_CONNECTIONS,
        interceptors: Iterable[grpc.aio.ServerInterceptor] = (),
        shared_port: bool = False,
        checked_names: Iterable[str] = (),
        live_name: str = "",
    ) -> None:
        self._access = access
        self._checked_names = ("", *checked_names)
        self._live_name = live_name
        self._health = health.aio.HealthServicer()
        self._probes: grpc.aio.Server | None = None  # answers health checks only
        self._updates: set[asyncio.Task[None]] = set()  # the loop keeps weak references only
        guard = access.interceptor((HEALTH_CHECK, *open_methods))
        options = dict(_SERVER_OPTIONS) | {
            "grpc.max_allowed_incoming_connections": max_connections,
            "grpc.so_reuseport": int(shared_port),
        }
        self.server = grpc.aio.server(
            interceptors=[guard, *interceptors, MalformedInterceptor()],
            options=[*options.items()],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)

    def listen(self, bind: str) -> int:
        """Add a port for calls between the cluster's processes, before `start`; return its number.
        Raises OSError, which names the address, if the server cannot listen there."""
        try:
            return self._access.listen(self.server, bind)
        except RuntimeError as error:
            raise _cannot_listen(bind) from error

    def listen_for_clients(self, bind: str, tls: TlsFiles | None) -> int:
        """Add a port for clients outside the cluster, who need no certificate, before `start`;
        return its number. With `tls` the port uses TLS. Raises OSError like `listen`."""
        try:
            if tls is None:
                return self.server.add_insecure_port(bind)
            return self.server.add_secure_port(bind, tls.server_credentials())
        except RuntimeError as error:
            raise _cannot_listen(bind) from error

    def listen_for_probes(self, bind: str, port: int) -> None:
        """Add a port that serves only health checks and needs no certificate, at the host of `bind`
        (host:port); does nothing if `port` is 0. Raises OSError, which names the address, if the
        server cannot listen there."""
        if not port:
            return
        self._probes = grpc.aio.server(options=[*(dict(_SERVER_OPTIONS) | _PROBE_OPTIONS).items()])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
        address = f"{bind.rpartition(':')[0]}:{port}"
        try:
            self._probes.add_insecure_port(address)
        except RuntimeError as error:
            raise _cannot_listen(address) from error

    async def start(self) -> None:
        """Start accepting calls; the health status is NOT_SERVING."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._live_name:
            await self._health.set(self._live_name, health_pb2.HealthCheckResponse.SERVING)
        await self.server.start()
        if self._probes is not None:
            await self._probes.start()

    def set_serving(self, serving: bool) -> None:
        """Set the health status to SERVING or NOT_SERVING, on the next turn of the event loop. Call
        after `start`."""
        status = health_pb2.HealthCheckResponse
        task = asyncio.get_running_loop().create_task(
            self._set_health(status.SERVING if serving else status.NOT_SERVING)
        )
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)

    async def _set_health(self, status: Any) -> None:
        for name in self._checked_names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones continue for at most `grace_s`, then cancel them.
        Returns at most STOP_S after `grace_s`, even if gRPC has not stopped by then."""
        try:
            async with asyncio.timeout(grace_s + STOP_S):
                await self.server.stop(grace_s)
                if self._probes is not None:
                    await self._probes.stop(0)
        except TimeoutError:
            log.warning(
                "gRPC has not stopped after %g s; continuing without waiting for it",
                grace_s + STOP_S,
            )


def _cannot_listen(bind: str) -> OSError:
    """Return the OSError for an address at which the server cannot listen. Its text names both
    possible causes, since gRPC does not say which one applies."""
    return OSError(
        f"cannot listen on {bind}: the port is in use, or the address is not on this machine"
    )
