"""The HTTP server: uvicorn with further bounds, its listener and its sockets."""

from pdserve.gateway.http.serving.listener import ConnectionCounts
from pdserve.gateway.http.serving.server import HttpServer
from pdserve.gateway.http.serving.sockets import hold_port, host_port, listen, unix_listener
