"""The HTTP server: uvicorn with further bounds."""

from pdserve.gateway.http.serving.server import HttpServer
