"""Code that all processes share: options, errors, logs, metrics, traces, lifecycle, gRPC,
authentication, API keys with their rate limits and fair shares, and the discovery of other
processes."""
