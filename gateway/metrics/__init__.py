"""Measurements of the gateway: Prometheus metrics, the log of requests, usage by key."""

from pdserve.gateway.metrics.gateway_processes import GatewayProcesses
from pdserve.gateway.metrics.metrics import GatewayMetrics
from pdserve.gateway.metrics.request_metrics import (
    MAX_SHOWN,
    CountUsage,
    RequestLog,
    RequestMetrics,
    RequestSnapshot,
    RequestUsage,
    uncounted,
)
