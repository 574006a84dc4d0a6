"""The HTTP server: uvicorn with further bounds, its listener and its sockets."""

from pdserve.gateway.http.serving.server import (
    ConnectionCounts,
    HttpServer,
    hold_port,
    host_port,
    listen,
    unix_listener,
)
