"""The HTTP server: uvicorn with stricter limits on its clients."""

from pdserve.gateway.http.serving.server import HttpServer
