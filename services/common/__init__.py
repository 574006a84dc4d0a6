"""Code that all processes share: options, logs, lifecycle, errors, gRPC, authentication."""
