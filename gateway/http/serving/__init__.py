"""The HTTP server: uvicorn with further bounds, its listener and its sockets."""
