"""What the gateway measures: Prometheus metrics, the log of requests, usage by key."""

from pdserve.gateway.metrics.gateway_processes import Siblings
from pdserve.gateway.metrics.metrics import GatewayMetrics
from pdserve.gateway.metrics.request_log import MAX_SHOWN, RequestLog
from pdserve.gateway.metrics.request_metrics import (
    CountUsage,
    Meter,
    MeteredRequest,
    RequestUsage,
    uncounted,
)
