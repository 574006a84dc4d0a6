"""The metrics port of processes without a web server: GET /metrics, and nothing else.

It needs no authentication, so connections, each with its thread, are bounded in number.
"""

import logging
import socket
import threading
import time
from contextlib import suppress
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import MetricsHandler

log = logging.getLogger(__name__)

ACCEPT_AGAIN_S = 0.1  # pause after a failure: the process may be out of descriptors
SILENT_S = 15.0  # timeout of a peer that neither sends nor reads
MAX_CONNECTIONS = 16  # a further one closes the oldest; a scrape takes milliseconds


class MetricsHttp:
    """Serves the metrics of a registry from a daemon thread until closed. It listens on the host of
    `bind` (host:port); port 0 picks a free one. Raises OSError if the port is taken."""

    def __init__(self, registry: CollectorRegistry, port: int, bind: str = "127.0.0.1:0") -> None:
        host = bind.rpartition(":")[0].strip("[]")
        self._server = _Server(host, port, _Handler.factory(registry))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()
        self.port: int = self._server.server_address[1]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(MetricsHandler):
    server_version, sys_version = "pdserve", ""

    def setup(self) -> None:
        self.request.settimeout(SILENT_S)
        super().setup()

    def do_GET(self) -> None:
        if urlsplit(self.path).path == "/metrics":
            # Always the text format, as on gateways: in OpenMetrics the library writes the colon of
            # vLLM's names as an underscore for a scraper that does not request UTF-8.
            del self.headers["Accept"]
            super().do_GET()
        else:
            self.send_error(404)


class _Server(ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 2 * MAX_CONNECTIONS  # further peers retry after 1 s, by their kernel
    allow_reuse_address = True

    def __init__(self, host: str, port: int, handler: Any) -> None:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self.address_family, _, _, _, address = infos[0]
        self._open: dict[Any, None] = {}  # connections, the oldest first
        self._lock = threading.Lock()  # guards `_open`: each connection has a thread
        self._failing = ""  # why no connection can be accepted
        super().__init__(address, handler)  # type: ignore[arg-type]  # of either family

    def get_request(self) -> Any:
        """Raises OSError, after which the caller tries again. Pauses first and logs each failure
        once, since a process without descriptors fails at once each time."""
        try:
            accepted = super().get_request()
        except OSError as error:
            if str(error) != self._failing:
                self._failing = str(error)
                log.warning("the metrics port cannot accept a connection: %s", error)
            time.sleep(ACCEPT_AGAIN_S)
            raise
        self._failing = ""
        return accepted

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            crowded = len(self._open) >= MAX_CONNECTIONS
            oldest = next(iter(self._open)) if crowded else None
            self._open.pop(oldest, None)
            self._open[request] = None
        if oldest is not None:
            with suppress(OSError):  # it has just closed by itself
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: strangers would fill the log."""
