"""Measurements of the gateway: Prometheus metrics, a log of open and recently ended requests, and
the token usage of API keys."""

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
