"""The HTTP server of the gateway, shared by all its APIs: connections, size and time limits, error
responses, streams and API documentation."""
