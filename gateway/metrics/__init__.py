"""What the gateway measures: Prometheus metrics, the log of requests, usage by key."""
