"""What all processes share: options, logs, lifecycle, errors, gRPC, authentication."""
