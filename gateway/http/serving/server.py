"""The HTTP server of the gateway: uvicorn, with TLS certificates that are reloaded when they
change, on connections that gateway/listener.py accepts."""

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Generator
from typing import Any

import uvicorn

from pdserve.gateway.http.api import ErrorFormat
from pdserve.gateway.http.responses import MAX_HELD_BYTES, HeldResponses
from pdserve.gateway.http.serving.protocol import BatchedWrites, BoundedProtocol
from pdserve.gateway.listener import ConnectionCounts, HttpListener, max_connections
from pdserve.services.common.process import LOOK_AGAIN_S, stamp

log = logging.getLogger(__name__)
KEEP_ALIVE_S = 75  # longer than the minute after which common proxies drop an idle connection
HANDSHAKE_S = 15.0  # of TLS


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handling and without its listening sockets, which the
    gateway process and HttpListener provide.

    `errors` formats the errors of input that is not a valid request; `stall_s` is how long a client
    may read nothing of its answer; `max_answers_bytes` limits the bytes of all answers that clients
    have not read yet. `certificate` and `key` are paths of PEM files; with them the server uses
    TLS, except on Unix sockets. `counts` are the connection counts for HttpListener.
    """

    def __init__(
        self,
        app: object,
        errors: ErrorFormat,
        stall_s: float,
        certificate: str = "",
        key: str = "",
        max_answers_bytes: int = MAX_HELD_BYTES,
        counts: ConnectionCounts | None = None,
    ) -> None:
        self._counts = counts
        self._files = certificate, key
        self._listeners: list[HttpListener] = []
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=functools.partial(  # type: ignore[arg-type]
                    BoundedProtocol,
                    errors=errors,
                    stall_s=stall_s,
                    held=HeldResponses(max_answers_bytes),
                    writes=BatchedWrites(),
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",  # the gateway logs its start and end
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                ssl_certfile=certificate or None,
                ssl_keyfile=key or None,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections on the sockets. Overrides uvicorn's method, which would
        create its own listening servers."""
        for sock in sockets or ():
            sock.listen(self.config.backlog)
            self._listeners.append(
                HttpListener(sock, self._connection, max_connections(), self._counts)
            )
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, then close the open ones as uvicorn does."""
        for listener in self._listeners:
            listener.close()
        await super().shutdown(sockets)

    async def _connection(self, sock: socket.socket) -> None:
        config: Any = self.config
        tls = None if sock.family == socket.AF_UNIX else config.ssl
        protocol: BoundedProtocol = config.http_protocol_class(
            config=config, server_state=self.server_state, app_state={}
        )
        with contextlib.suppress(OSError):  # the peer has gone, or shows no TLS in time
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_S if tls else None,
            )
            await protocol.lost.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def watch_certificate(self) -> None:
        """Load the TLS certificate again whenever its file or its key's file changes, for later
        connections. Runs until cancelled."""
        certificate, key = self._files
        if not certificate:
            await asyncio.Event().wait()  # nothing changes
        loaded, failed = (stamp(certificate), stamp(key)), None
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            current = stamp(certificate), stamp(key)
            if current in (loaded, failed):
                continue
            try:
                # A certificate may come before its key: check the pair before changing the context
                # in use.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
                assert self.config.ssl is not None
                self.config.ssl.load_cert_chain(certificate, key)
            except (OSError, ssl.SSLError) as error:
                failed = current
                log.error("cannot load the new HTTP certificate, keeping the old one: %s", error)
            else:
                loaded = current
                log.info("loaded a new HTTP certificate")
