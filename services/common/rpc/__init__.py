"""gRPC between processes: channels, servers, bounded queues, and the encoding of tokens."""
