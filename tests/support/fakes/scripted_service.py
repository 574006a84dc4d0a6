"""The gateway's Service over a router with scripted answers."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fakes.in_process_text import InProcessPool
from fakes.router import FakeRouter
from pdserve.gateway.admission import AdmissionLimits
from pdserve.gateway.metrics import CountUsage, GatewayMetrics, GatewayProcesses, uncounted
from pdserve.gateway.service import Records, ServerTools, Service, ServiceOptions
from pdserve.gateway.settings import GatewaySettings
from pdserve.services.common.rate_limits import RateLimits, RateSettings
from pdserve.services.common.tracing import NO_TRACER, Tracer
from pdserve.text import ParserChoice


def scripted_service(
    router: FakeRouter,
    limits: AdmissionLimits | None = None,
    text_pool: Any = None,
    rates: RateLimits | None = None,
    template_kwargs: Sequence[str] = GatewaySettings().template_kwargs,
    parsers: ParserChoice | None = None,
    count_usage: CountUsage = uncounted,
    server_tools: ServerTools | None = None,
    clock: Callable[[], float] | None = None,
    timeout_s: float = 600.0,
    tracer: Tracer = NO_TRACER,
    processes: GatewayProcesses | None = None,
    **options: Any,
) -> Service:
    """Return a service; call it within a running loop."""
    return Service(
        router,
        text_pool or InProcessPool(),
        limits or AdmissionLimits(64, 32),
        rates or RateLimits(RateSettings()),
        Records(
            GatewayMetrics(),
            clock or asyncio.get_running_loop().time,
            count_usage,
            tracer,
            processes or GatewayProcesses(),
        ),
        ServiceOptions(
            timeout_s,
            queue_timeout_s=60.0,
            template_kwargs=template_kwargs,
            parsers=parsers or ParserChoice(),
            server_tools=server_tools,
            **options,
        ),
    )
