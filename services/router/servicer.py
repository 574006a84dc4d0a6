"""gRPC services of the router: Router for gateways and clients, and Fleet.Join for workers.

Reading a client's messages never waits for the client's events to be sent. A slow client fills only
the outbox of its session, in which tokens are merged.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import suppress
from typing import Any

import grpc.aio

from pdserve.engine.api import context_exceeded
from pdserve.engine.kv import decode_spec
from pdserve.protos import common_pb2, fleet_pb2, fleet_pb2_grpc, router_pb2_grpc
from pdserve.protos import common_pb2 as pb
from pdserve.protos import router_pb2 as rpc
from pdserve.services.common.auth.access import Access
from pdserve.services.common.auth.certificates import Role
from pdserve.services.common.errors import ServiceError, abort
from pdserve.services.common.fairness import FairShare
from pdserve.services.common.rate_limits import RateLimits
from pdserve.services.common.rpc import (
    AUTHORIZATION,
    PROTOCOL_VERSION,
    Backpressure,
    IdsCollector,
    RequestProgress,
    TokensOutbox,
    VersionGate,
    deliver,
    host_of,
)
from pdserve.services.common.tenants import EVERYBODY, ApiKeys, Tenant
from pdserve.services.common.tracing import NO_TRACER, Tracer, context_of
from pdserve.services.router.core import RouterCore
from pdserve.services.router.placement import WorkerPool
from pdserve.services.router.request import PickQuery
from pdserve.services.router.settings import RouterSettings

MAX_ID_LEN = 256
ID_BYTES = 40  # most bytes of a prompt's token id in a Python list
OPEN_METHODS = ("/pdserve.v1.Router/Generate", "/pdserve.v1.Router/ListModels")
Context = grpc.aio.ServicerContext[Any, Any]
INCARNATION_BYTES = 16
HEARTBEAT_ECHO_S = 2.0  # between two echoes; a worker joins again after 5 s without one
ROLES = {fleet_pb2.PREFILL: Role.PREFILL, fleet_pb2.DECODE: Role.DECODE}


class ClientSession(TokensOutbox[rpc.RequestEvent]):
    """Outbox of the events for one client. `key`: the gateway's incarnation, or random bytes for a
    Generate call."""

    def __init__(self, key: bytes, reads_rows: bool = False) -> None:
        super().__init__(rpc.RequestEvent)
        self.key = key
        self.reads_rows = reads_rows
        self.over = False  # the one request of a Generate call has ended
        self.num_generated = 0  # tokens of that request


class RouterServicer(router_pb2_grpc.RouterServicer):
    """The Router service: sessions for gateways, Generate and ListModels for gRPC clients, the
    fleet's state, and picks for endpoint pickers."""

    def __init__(
        self,
        core: RouterCore,
        settings: RouterSettings,
        access: Access,
        keys: ApiKeys,
        rates: RateLimits,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._core = core
        self._tracer = tracer
        self._access = access
        self._settings = settings
        self._keys = keys
        self._rates = rates
        self._held = FairShare(settings.max_generate_bytes)
        self._sessions: set[ClientSession] = set()
        self._versions = VersionGate("router")

    def send_away(self) -> None:
        """End the sessions of all gateways after their queued events, when the router drains. Each
        gateway continues at another router, or at this one after its restart."""
        for session in self._sessions:
            session.close()

    async def Session(
        self, request_iterator: AsyncIterator[rpc.GatewayMessage], context: Context
    ) -> AsyncIterator[rpc.RouterMessage]:
        first = await anext(request_iterator, rpc.GatewayMessage())
        if not first.hello.incarnation:
            text = "the first message of a Session call must be `hello`, with `incarnation` set"
            await abort(context, ServiceError(pb.INVALID_ARGUMENT, text, "hello"))
        if self._core.draining:
            await abort(context, ServiceError(pb.UNAVAILABLE, "the router is shutting down"))
        try:
            self._versions.check(first.hello.protocol, f"gateway at {host_of(context.peer())}")
        except ServiceError as error:
            await abort(context, error)
        session = ClientSession(first.hello.incarnation, first.hello.reads_rows)
        self._sessions.add(session)
        reader = asyncio.create_task(self._read(request_iterator, session))
        try:
            yield rpc.RouterMessage(protocol=PROTOCOL_VERSION)
            async for batch in session:
                yield rpc.RouterMessage(events=batch)
        finally:
            self._sessions.discard(session)
            self._core.client_gone(session)
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader  # raises the error of an unreadable message

    async def _read(
        self, messages: AsyncIterator[rpc.GatewayMessage], session: ClientSession
    ) -> None:
        collector = IdsCollector()
        try:
            async for message in messages:
                self._take(message, session, collector)
        except (grpc.RpcError, grpc.aio.BaseError):
            pass  # the client is gone, or the server has stopped; the session ends below
        finally:
            session.close()

    def _take(
        self, message: rpc.GatewayMessage, session: ClientSession, collector: IdsCollector
    ) -> None:
        kind = message.WhichOneof("message")
        if kind == "cancel":
            cancel = message.cancel
            self._core.cancel(session, cancel.request, tuple(cancel.choices))
        elif kind == "ids_part":
            collector.collect(message.ids_part)
        elif kind == "start":
            if self._core.draining:
                return  # its gateway has been sent away and will issue it again
            start = message.start
            try:
                ids = collector.take(start.request, start.prompt_ids)
                if not 0 < len(start.request) <= MAX_ID_LEN:
                    text = f"the request id must have 1 to {MAX_ID_LEN} characters"
                    raise ServiceError(pb.INVALID_ARGUMENT, text, "request")
                self._core.submit(RequestProgress(start, ids), session)
            except ServiceError as error:
                refuse(session, start, error)

    async def Generate(self, request: rpc.GenerateRequest, context: Context) -> None:
        tenant = await self._authorize(context)
        parent = context_of(context.invocation_metadata())
        span = self._tracer.begin("generate", parent, time.monotonic(), entry=True)
        error = "CANCELLED"
        try:
            num_bytes = request.ByteSize() + ID_BYTES * len(request.prompt_ids)
            with self._held.holding(tenant.id, num_bytes, "prompts"):
                start = self._start_of(request, tenant)
                start.trace_parent, start.trace_state = span.context.parent, span.context.state
                span.set(pdserve__request=start.request)
                await self._count(tenant, len(request.prompt_ids), context)
                await self._run(RequestProgress(start, request.prompt_ids), tenant, context)
            error = ""
        except ServiceError as failed:
            error = pb.ErrorCode.Name(failed.code)
            await abort(context, failed)
        finally:
            span.end(error)

    async def _count(self, tenant: Tenant, num_tokens: int, context: Context) -> None:
        """Count a Generate call and its prompt tokens against the rate limits of the caller's key,
        and return the remaining rate in the trailing metadata. Raises ServiceError if the key
        exceeds its rate."""
        try:
            await self._rates.count_request(tenant.id)
            await self._rates.count_tokens(tenant.id, num_tokens)
        finally:
            context.set_trailing_metadata(tuple((await self._rates.headers(tenant.id)).items()))

    async def _run(self, progress: RequestProgress, tenant: Tenant, context: Context) -> None:
        """Run the request of a Generate call, and send its responses. Raises ServiceError if the
        request fails."""
        session = ClientSession(os.urandom(16))
        request = progress.start.request
        settings = self._settings
        backpressure = Backpressure(settings.max_buffer_bytes, settings.stall_timeout_s)
        self._core.submit(progress, session)
        try:
            await deliver(self._answers(session, request), context.write, backpressure)
        finally:
            self._leave(session, request)
            self._rates.tokens_spent(tenant.id, session.num_generated)

    async def _answers(
        self, session: ClientSession, request: str
    ) -> AsyncGenerator[rpc.GenerateResponse, None]:
        """Yield the responses of a Generate call. Raises ServiceError if the request fails."""
        try:
            async for batch in session:
                for event in batch:
                    kind = event.WhichOneof("event")
                    session.over = kind in ("finished", "failed")
                    if kind == "failed":
                        raise ServiceError.from_failure(event.failed.failure)
                    elif kind == "tokens":
                        session.num_generated += len(event.tokens.ids)
                        yield rpc.GenerateResponse(tokens=event.tokens)
                    elif kind == "prompt_logprobs":
                        yield rpc.GenerateResponse(prompt_logprobs=event.prompt_logprobs)
                    elif kind == "finished":
                        yield rpc.GenerateResponse(finished=event.finished)
                if session.over:
                    return
        finally:
            self._leave(session, request)

    def _leave(self, session: ClientSession, request: str) -> None:
        """Cancel the request of a Generate call unless the request has ended."""
        if not session.over:
            session.over = True
            self._core.cancel(session, request)

    def _start_of(self, request: rpc.GenerateRequest, tenant: Tenant) -> pb.Start:
        """Build the Start of a Generate call's request. Raises ServiceError if the call's timeout
        is longer than the router's own, if the prompt is longer than the model's context, or if the
        call names no model and the router does not serve exactly one."""
        max_timeout_ms = int(self._settings.request_timeout_s * 1000)
        if request.timeout_ms > max_timeout_ms:
            text = f"timeout_ms is {request.timeout_ms}, but must be at most {max_timeout_ms}"
            raise ServiceError(pb.INVALID_ARGUMENT, text, "timeout_ms")
        models = {info.name: info for info in self._core.models()}
        model = request.model or _only(models)
        num_tokens = len(request.prompt_ids)
        if model in models and num_tokens > models[model].context_len:
            context_len = models[model].context_len
            text = context_exceeded(context_len, num_tokens, request.params.max_tokens, "prompt")
            raise ServiceError(pb.CONTEXT_LENGTH_EXCEEDED, text, "prompt_ids")
        seed = request.seed if request.HasField("seed") else int.from_bytes(os.urandom(8))
        return pb.Start(
            request=f"gen-{os.urandom(12).hex()}",
            model=model,
            cache_salt=tenant.cache_salt(request.cache_salt),
            tenant=tenant.id,
            params=request.params,
            seed=seed,
            remaining_ms=request.timeout_ms or max_timeout_ms,
            queue_remaining_ms=int(self._settings.queue_timeout_s * 1000),
        )

    async def ListModels(
        self, request: rpc.ListModelsRequest, context: Context
    ) -> rpc.ListModelsResponse:
        await self._authorize(context)
        sharded = self._core.fleet.sharded
        return rpc.ListModelsResponse(models=self._core.models(), sharded=sharded)

    async def GetFleet(self, request: rpc.GetFleetRequest, context: Context) -> rpc.FleetView:
        return self._core.view()

    async def Pick(self, request: rpc.PickRequest, context: Context) -> rpc.PickReply:
        if self._core.draining:
            await abort(context, ServiceError(pb.UNAVAILABLE, "the router is shutting down"))
        if not request.prompt_ids:
            await abort(
                context,
                ServiceError(pb.INVALID_ARGUMENT, "prompt_ids must not be empty", "prompt_ids"),
            )
        pooling = request.pooling if request.HasField("pooling") else None
        pool = WorkerPool(request.model, request.tokenizer, pooling)
        if self._core.refuses(pool, request.tenant):
            return rpc.PickReply(overloaded=True)
        hosts, ids = frozenset(request.hosts), list(request.prompt_ids)
        query = PickQuery(pool, ids, request.cache_salt, hosts)
        picked_workers = [
            rpc.PickedWorker(host=host, cached_tokens=cached)
            for host, cached in self._core.pick(query)
        ]
        return rpc.PickReply(
            workers=picked_workers, elsewhere=not (picked_workers or self._core.decodes_at(hosts))
        )

    async def _authorize(self, context: Context) -> Tenant:
        """Return the tenant of the caller's API key, or abort the call if the key is missing or
        invalid. Gateways need no key, because they check the keys of their callers."""
        if self._access.may_be(context, Role.GATEWAY):
            return EVERYBODY
        authorization = dict(context.invocation_metadata() or ()).get(AUTHORIZATION, "")
        accepts_clients = self._keys.required or self._access.separates_clients
        tenant = self._keys.tenant(str(authorization)) if accepts_clients else None
        if tenant is None:
            text = "the API key is missing or invalid"
            await abort(context, ServiceError(pb.UNAUTHENTICATED, text))
        return tenant


def _only(models: Collection[str]) -> str:
    """Return the name of the only model. Raises ServiceError if there is no model, or more than
    one."""
    if not models:
        raise ServiceError(pb.UNAVAILABLE, "no worker has registered with the router yet", "", 1.0)
    if len(models) > 1:
        text = f"model must be one of: {', '.join(models)}"
        raise ServiceError(pb.INVALID_ARGUMENT, text, "model")
    return next(iter(models))


def refuse(session: ClientSession, start: pb.Start, error: ServiceError) -> None:
    """Send Failed with the error to the client of a Start that is not a valid request."""
    failed = pb.Failed(request=start.request, epoch=start.epoch, failure=error.to_failure())
    session.put(rpc.RequestEvent(failed=failed))


def check_hello(hello: fleet_pb2.WorkerHello) -> None:
    """Check the fields of a worker's registration (WorkerHello). Raises
    ServiceError(INVALID_ARGUMENT), which names the field, if one is invalid."""
    invalid_field = ""
    if hello.role not in ROLES:
        invalid_field = "role"
    elif len(hello.incarnation) != INCARNATION_BYTES:
        invalid_field = "incarnation"
    elif not hello.address.rpartition(":")[2].isdigit():
        invalid_field = "address"
    elif not hello.card.name or not _has_layout(hello.card):
        invalid_field = "card"
    if invalid_field:
        raise ServiceError(
            common_pb2.INVALID_ARGUMENT,
            f"the router refused the worker's registration: its field {invalid_field} is invalid",
            invalid_field,
        )


def _has_layout(card: common_pb2.ModelCard) -> bool:
    """Return whether the KV layout in a model info can be decoded."""
    try:
        decode_spec(card.kv_spec)
    except ValueError:
        return False
    return True


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """The Fleet service, with which workers join the router. The workers' side of it is
    services/worker/membership.py."""

    def __init__(self, core: RouterCore, access: Access) -> None:
        self._core = core
        self._access = access
        self._versions = VersionGate("router")

    async def Join(
        self,
        request_iterator: AsyncIterator[fleet_pb2.WorkerReport],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[fleet_pb2.JoinReply]:
        first = await anext(request_iterator, fleet_pb2.WorkerReport())
        hello = first.hello
        try:
            if not first.HasField("hello"):
                text = "the first report of a Join call must be `hello`"
                raise ServiceError(common_pb2.INVALID_ARGUMENT, text, "hello")
            self._versions.check(hello.protocol, f"worker {hello.address}")
            check_hello(hello)
            if not self._access.may_be(context, ROLES[hello.role]):
                text = (
                    "the router refused the worker's registration: its certificate has another role"
                )
                raise ServiceError(common_pb2.PERMISSION_DENIED, text, "role")
        except ServiceError as error:
            await abort(context, error)
        worker = self._core.join(hello)
        lease = worker.lease
        try:
            welcome = fleet_pb2.Welcome(
                router_incarnation=self._core.incarnation, protocol=PROTOCOL_VERSION
            )
            yield fleet_pb2.JoinReply(welcome=welcome)
            last_echo = 0.0
            async for report in request_iterator:
                if not self._core.report(worker, report, lease):
                    return
                now = time.monotonic()
                has_heartbeat = report.HasField("heartbeat") or report.HasField("load_beat")
                if has_heartbeat and now - last_echo >= HEARTBEAT_ECHO_S:
                    last_echo = now
                    yield fleet_pb2.JoinReply(echo=fleet_pb2.HeartbeatEcho())
        finally:
            self._core.left(worker, lease)
