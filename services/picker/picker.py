"""Chooses the endpoints of one request: by the routers' policy for its prompt, else any ready one.

Invariant: a decision takes at most `limit_s`, however slow routers and tokenizer workers are.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from pdserve.gateway.http.guard import API_KEY, SESSION_ID
from pdserve.protos.common_pb2 import OVERLOADED, UNAVAILABLE, ErrorCode
from pdserve.protos.router_pb2 import PickReply, PickRequest
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.tenants import EVERYBODY, ApiKeys, Tenant
from pdserve.services.common.tracing import NO_TRACER, TraceContext, Tracer
from pdserve.services.picker.endpoints import AVOID_S, Endpoint, Endpoints, spread
from pdserve.services.picker.prompts import RequestPrompt

NO_WORKER_S = 1.0  # how long no router is queried about hosts without a decode worker
MAX_NO_WORKER_SETS = 64
MAX_IDS = 1 << 20  # of a prompt sent to routers: 3 MB
KEY_BYTES = 512  # of a body: identify its conversation if the client names none


BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class PickerMetrics:
    """The picker's metrics, as a Prometheus collector."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._decisions = Counter(
            "pdserve_picker_decisions",
            "Requests by the reason for their endpoint, or for having none",
            ("reason",),
            registry=registry,
        )
        self._seconds = Histogram(
            "pdserve_picker_decision_seconds",
            "Seconds from a request's body to its endpoint",
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._elsewhere = Counter(
            "pdserve_picker_served_elsewhere",
            "Requests answered by an endpoint other than the first choice",
            registry=registry,
        )
        self._failures = Counter(
            "pdserve_picker_failures",
            "Proxy streams that failed because of an internal error of the picker",
            registry=registry,
        )

    def decided(self, reason: str, seconds: float | None) -> None:
        """Count a request that got an endpoint after `seconds`, or none (None)."""
        self._decisions.labels(reason).inc()
        if seconds is not None:
            self._seconds.observe(seconds)

    def served_elsewhere(self) -> None:
        self._elsewhere.inc()

    def failed(self) -> None:
        self._failures.inc()

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()


class PolicyRouters(Protocol):
    """The routers, whose placement policy chooses hosts."""

    @property
    def num_connected(self) -> int: ...

    async def pick(self, request: PickRequest) -> PickReply:
        """Request a pick from a router. Raises ServiceError."""
        ...


class PromptSource(Protocol):
    """Makes prompts from request bodies."""

    async def read(self, path: str, body: bytes, tenant: Tenant) -> RequestPrompt | None: ...


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """The parts of an HTTP request that decide its endpoint. `headers`: by lower-case name. `body`:
    empty if unknown. `hint`: see Endpoints."""

    headers: Mapping[str, str]
    body: bytes
    hint: Sequence[str] | None

    @property
    def path(self) -> str:
        path = self.headers.get(":path", "").partition("?")[0]
        return path.rstrip("/") or "/"


@dataclass(slots=True)
class EndpointChoice:
    """The endpoints for a request in the order in which they are tried, the reason, and the
    endpoint that counts the request as open."""

    endpoints: tuple[Endpoint, ...]
    reason: str
    _holder: Endpoint | None = None

    @property
    def text(self) -> str:
        """The endpoints as the ext_proc protocol writes them."""
        return ",".join(endpoint.address for endpoint in self.endpoints)

    def held_by(self, endpoint: Endpoint, now: float) -> None:
        """Count the request at this endpoint from now on, and nowhere else."""
        if endpoint is not self._holder:
            self.ended()
            self._holder = endpoint
            endpoint.sent(now)

    def ended(self) -> None:
        """Stop counting the request, which is over."""
        if self._holder is not None:
            self._holder.num_open -= 1
            self._holder = None


class EndpointPicker:
    """Chooses the endpoints of all requests of one process."""

    def __init__(
        self,
        endpoints: Endpoints,
        routers: PolicyRouters,
        prompts: PromptSource,
        keys: ApiKeys,
        metrics: PickerMetrics,
        clock: Callable[[], float],
        limit_s: float,
        num_fallbacks: int,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._endpoints = endpoints
        self._routers = routers
        self._prompts = prompts
        self._keys = keys
        self._metrics = metrics
        self._clock = clock
        self._limit_s = limit_s
        self._max_endpoints = 1 + num_fallbacks
        self._tracer = tracer
        # Sets of hosts without a decode worker, and until when.
        self._no_worker_until: dict[frozenset[str], float] = {}

    def tenant(self, headers: Mapping[str, str]) -> Tenant | None:
        """Return the tenant of the request; None if its key is wrong."""
        credentials = headers.get("authorization") or f"Bearer {headers.get(API_KEY, '')}"
        return self._keys.tenant(credentials)

    def wants_body(self, headers: Mapping[str, str]) -> bool:
        """Return whether a decision depends on the request's body."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        is_json = kind == "application/json" or kind.endswith("+json")
        return is_json and headers.get(":method") == "POST" and self.tenant(headers) is not None

    async def pick(self, request: ProxiedRequest) -> EndpointChoice:
        """Choose endpoints. The first one counts the request as open until another has `served` it.
        Raises ServiceError UNAVAILABLE if none is ready, OVERLOADED if the request would be
        refused."""
        began = self._clock()
        parent = request.headers.get("traceparent", ""), request.headers.get("tracestate", "")
        span = self._tracer.begin("pick", TraceContext(*parent), began)
        try:
            choice = await self._pick(request)
        except ServiceError as error:
            overloaded = error.code == OVERLOADED
            self._metrics.decided("overloaded" if overloaded else "none ready", None)
            span.end(ErrorCode.Name(error.code))
            raise
        span.set(pdserve__endpoints=choice.text, pdserve__reason=choice.reason)
        span.end()
        now = self._clock()
        self._metrics.decided(choice.reason, now - began)
        choice.held_by(choice.endpoints[0], now)
        return choice

    async def _pick(self, request: ProxiedRequest) -> EndpointChoice:
        candidates = self._endpoints.candidates(request.hint)
        if not candidates:
            raise ServiceError(UNAVAILABLE, "no endpoint is ready", retry_after_s=1.0)
        tenant = self.tenant(request.headers)
        hosts, reason = await self._by_policy(request, candidates, tenant)
        now = self._clock()
        order = spread(candidates, _conversation(request, tenant), now)
        if hosts:
            rank_by_host = {host: rank for rank, host in enumerate(hosts)}
            order.sort(
                key=lambda e: (now < e.avoided_until, rank_by_host.get(e.host, len(rank_by_host)))
            )
        return EndpointChoice(tuple(order[: self._max_endpoints]), reason)

    async def _by_policy(
        self, request: ProxiedRequest, candidates: Sequence[Endpoint], tenant: Tenant | None
    ) -> tuple[Sequence[str], str]:
        """Return hosts, best first, and the reason; without hosts, any endpoint will do. Raises
        ServiceError OVERLOADED."""
        hosts = frozenset(endpoint.host for endpoint in candidates)
        if len(candidates) == 1:
            return (), "only one"
        if tenant is None:
            return (), "wrong key"
        if not request.body:
            return (), "no prompt"
        if self._no_worker_until.get(hosts, 0.0) > self._clock():
            return (), "no worker there"
        if not self._routers.num_connected:
            return (), "no router"
        try:
            async with asyncio.timeout(self._limit_s):
                prompt = await self._prompts.read(request.path, request.body, tenant)
                if prompt is None:
                    return (), "no prompt"
                reply = await self._routers.pick(
                    PickRequest(
                        model=prompt.model,
                        prompt_ids=prompt.ids[:MAX_IDS],
                        cache_salt=prompt.cache_salt,
                        tenant=tenant.id,
                        hosts=sorted(hosts),
                        tokenizer=prompt.tokenizer,
                        pooling=prompt.pooling,
                    )
                )
        except TimeoutError:
            return (), "late"
        except ServiceError:
            return (), "no router"
        if reply.overloaded:
            raise ServiceError(OVERLOADED, "too many requests are waiting", retry_after_s=1.0)
        if reply.elsewhere:
            self._note_no_worker(hosts)
        if not reply.workers:
            return (), "no worker there"
        return [worker.host for worker in reply.workers], "policy"

    def _note_no_worker(self, hosts: frozenset[str]) -> None:
        if len(self._no_worker_until) >= MAX_NO_WORKER_SETS:
            self._no_worker_until.clear()
        self._no_worker_until[hosts] = self._clock() + NO_WORKER_S

    def served(self, choice: EndpointChoice, address: str) -> None:
        """Record which endpoint answered; those before it are avoided for AVOID_S."""
        now = self._clock()
        addresses = [endpoint.address for endpoint in choice.endpoints]
        skipped = choice.endpoints[: addresses.index(address)] if address in addresses else ()
        for endpoint in skipped:
            endpoint.avoided_until = now + AVOID_S
        if address != addresses[0]:
            self._metrics.served_elsewhere()
        if (holder := self._endpoints.get(address)) is not None:
            choice.held_by(holder, now)


def _conversation(request: ProxiedRequest, tenant: Tenant | None) -> bytes:
    """Return a key for requests of one client that belong together or begin alike; empty: no
    body."""
    session_id = request.headers.get(SESSION_ID, "").encode()
    content = session_id or request.body[:KEY_BYTES]
    if not content:
        return b""
    return hashlib.blake2b((tenant or EVERYBODY).id + content, digest_size=16).digest()
