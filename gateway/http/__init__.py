"""The HTTP shell that carries every API: server, bounds, errors, streams, documentation."""
