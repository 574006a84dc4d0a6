"""The gateway's one session to a router, on which all its requests travel.

Invariant: every open request gets exactly one terminal event. When a router is lost, its requests
are issued again to the next one, each with the ids that it has, its placement and a higher epoch.
Without any router, a request that a worker had waits until its deadline; others fail after GRACE_S.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import grpc

from pdserve.gateway.router_client.model_files import ModelFiles
from pdserve.gateway.router_client.resumable_request import ResumableRequest
from pdserve.protos.common_pb2 import (
    DEADLINE_EXCEEDED,
    INVALID_ARGUMENT,
    UNAVAILABLE,
    ModelCard,
    Start,
)
from pdserve.protos.router_pb2 import (
    Cancel,
    FleetView,
    GatewayHello,
    GatewayMessage,
    RequestEvent,
)
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.host.channel import open_channel, resolve
from pdserve.services.host.errors import ServiceError
from pdserve.services.host.fragments import send_ids

log = logging.getLogger("pdserve.gateway.router_client.client")

CONNECT_S = 2.0  # to open a connection before the next router is tried
GRACE_S = 10.0  # a request that never ran fails after this without a router
LATE_S = 2.0  # the router ends a request at its deadline; past it by this, we do
STABLE_S = 1.0  # a session that lasted longer worked
MAX_BACKOFF_S = 0.5  # so that a router is found again well before decode gives its requests up


class _Inbox:
    """Events of one request, in order, from the session's reader to its one consumer."""

    def __init__(self, request: ResumableRequest, now: float) -> None:
        self.request = request
        self.opened = now
        self.num_refusals = 0  # by routers that take no new request
        self._events: deque[RequestEvent] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: RequestEvent | None) -> None:
        if event is not None:
            self._events.append(event)
            self._arrived.set()

    async def get(self) -> RequestEvent:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


class RouterClient:
    """Talks to the first router of a list that answers; see gateway/router_client/upstream.py."""

    def __init__(self, routers: Sequence[str], secret: str, boot: bytes) -> None:
        if not routers:
            raise ValueError("no router address given")
        self._routers = tuple(routers)
        self._num_routers = len(self._routers)  # addresses that the names stood for
        self._secret = secret
        self._boot = boot
        self._inboxes: dict[str, _Inbox] = {}
        self._outgoing: deque[GatewayMessage] = deque()
        self._to_send = asyncio.Event()
        self._channel: grpc.aio.Channel | None = None  # of the live session
        self._down_since = 0.0  # when the last session that worked was lost
        self._task: asyncio.Task[None] | None = None
        self._model_files = ModelFiles()

    async def start(self) -> "asyncio.Task[None]":
        """Begin to look for a router. The task ends only by a failure, or by `close`."""
        self._task = asyncio.create_task(self._keep_session(), name="router session")
        return self._task

    async def close(self) -> None:
        """End the session; open requests fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for inbox in self._inboxes.values():
            inbox.put(inbox.request.fail(UNAVAILABLE, "the server is shutting down", 1000))

    @property
    def connected(self) -> bool:
        return self._channel is not None

    # --- requests

    async def open(self, start: Start) -> AsyncGenerator[RequestEvent, None]:
        loop = asyncio.get_running_loop()
        if start.request in self._inboxes:
            raise ServiceError(INVALID_ARGUMENT, f"request id {start.request!r} is in use")
        request = ResumableRequest(start, loop.time())
        inbox = _Inbox(request, loop.time())
        self._inboxes[start.request] = inbox
        timer = None
        if request.deadline is not None:
            timer = loop.call_at(request.deadline + LATE_S, self._expire, inbox)
        try:
            if self._channel is not None:
                self._issue(inbox)
            while True:
                event = await inbox.get()
                yield event
                if event.WhichOneof("event") in ("finished", "failed"):
                    return
        finally:
            if timer is not None:
                timer.cancel()
            del self._inboxes[start.request]
            if not request.ended:
                self._send(GatewayMessage(cancel=Cancel(request=start.request)))

    def cancel(self, request: str, choices: Sequence[int] = ()) -> None:
        inbox = self._inboxes.get(request)
        if inbox is not None and not inbox.request.ended:
            inbox.request.abort(choices)
            self._send(GatewayMessage(cancel=Cancel(request=request, choices=choices)))

    def _expire(self, inbox: _Inbox) -> None:
        if not inbox.request.ended:
            self._send(GatewayMessage(cancel=Cancel(request=inbox.request.id)))
        inbox.put(inbox.request.fail(DEADLINE_EXCEEDED, "the request ran longer than its timeout"))

    def _issue(self, inbox: _Inbox) -> None:
        now = asyncio.get_running_loop().time()
        request = inbox.request
        start = request.issue(now)
        if start is None:
            inbox.put(
                request.fail(DEADLINE_EXCEEDED, "the request ran longer than its timeout")
                if request.expired(now)
                else request.finish()
            )
            return
        parts, rest = send_ids(start.request, start.prompt_ids)
        if parts:
            rest = list(rest)
            del start.prompt_ids[:]
            start.prompt_ids.extend(rest)
        for part in parts:
            self._send(GatewayMessage(ids_part=part))
        self._send(GatewayMessage(start=start))

    def _send(self, message: GatewayMessage) -> None:
        """Queue for the session. Without a session nothing is lost: the next one issues every
        open request again, and a router ends the requests of a session that it lost."""
        if self._channel is not None:
            self._outgoing.append(message)
            self._to_send.set()

    # --- the session

    async def _keep_session(self) -> None:
        backoff = 0.05
        loop = asyncio.get_running_loop()
        async for address in self._addresses():
            try:
                async with open_channel(address, self._secret) as channel:
                    await _connect(channel)
                    await self._run_session(channel, address)
            except (grpc.aio.AioRpcError, ConnectionError, TimeoutError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                log.warning("router %s: %s", address, reason or type(error).__name__)
            finally:
                self._channel = None
                self._outgoing.clear()
            now = loop.time()
            if self._down_since == math.inf:
                backoff, self._down_since = 0.05, now
            for inbox in list(self._inboxes.values()):
                waits = inbox.request.placed and inbox.request.deadline is not None
                if not waits and now - max(inbox.opened, self._down_since) > GRACE_S:
                    inbox.put(inbox.request.fail(UNAVAILABLE, "no router can be reached", 1000))
            backoff = min(MAX_BACKOFF_S, backoff * 2)
            await asyncio.sleep(backoff)

    async def _addresses(self) -> AsyncIterator[str]:
        """The routers' addresses, over and over; each round looks their names up again."""
        while True:
            found: list[str] = []
            for name in self._routers:
                found += await asyncio.to_thread(resolve, name) or [name]
            self._num_routers = len(found)
            for address in found:
                yield address

    async def _run_session(self, channel: grpc.aio.Channel, address: str) -> None:
        call = RouterStub(channel).Session()
        await call.write(GatewayMessage(hello=GatewayHello(boot=self._boot)))
        log.info("connected to router %s", address)
        self._channel = channel
        for inbox in list(self._inboxes.values()):
            self._issue(inbox)
        writer = asyncio.create_task(self._write(call))
        since = asyncio.get_running_loop().time()
        try:
            async for message in call:
                self._down_since = math.inf  # it works: it is not only a port that is open
                accepted = [self._dispatch(event) for event in message.events]
                if not all(accepted):
                    raise ConnectionError("it takes no new request")
            raise ConnectionError("the session ended")
        finally:
            if asyncio.get_running_loop().time() - since > STABLE_S:
                self._down_since = math.inf
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: "grpc.aio.StreamStreamCall[GatewayMessage, object]") -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            while self._outgoing:
                await call.write(self._outgoing.popleft())

    def _dispatch(self, event: RequestEvent) -> bool:
        """Give an event to its request. False if this router takes no new requests.

        That is a router that drains, or one that no worker has joined. The session is then ended
        as if it had been lost, and all its requests go to the next router.
        """
        kind = event.WhichOneof("event")
        inbox = None if kind is None else self._inboxes.get(getattr(event, kind).request)
        if inbox is None:
            return True
        failed = event.failed
        if kind == "failed" and failed.failure.code == UNAVAILABLE and not failed.attempt:
            inbox.num_refusals += 1
            if inbox.num_refusals < self._num_routers:
                return False
        inbox.put(inbox.request.take(event))
        return True

    # --- models and fleet

    async def models(self) -> Sequence[ModelCard]:
        return await self._model_files.models(self._channel)

    async def blob(self, digest: str) -> bytes:
        return await self._model_files.blob(self._channel, digest)

    async def fleet(self) -> FleetView:
        return await self._model_files.fleet(self._channel)


async def _connect(channel: grpc.aio.Channel) -> None:
    """Wait for a connection. Raises ConnectionError when it is refused, TimeoutError."""
    async with asyncio.timeout(CONNECT_S):
        state = channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise ConnectionError("cannot connect")
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)
