"""The gateway's session with one router, which is reopened when it breaks until it is closed."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import grpc

from pdserve.gateway.router_client.routing import Recent
from pdserve.protos.router_pb2 import GatewayHello, GatewayMessage, RequestEvent
from pdserve.protos.router_pb2_grpc import RouterStub
from pdserve.services.common.auth.access import Access
from pdserve.services.common.auth.certificates import Role
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import (
    PROTOCOL_VERSION,
    RowReader,
    TokenRow,
    check_version,
    is_refusal,
)

log = logging.getLogger(__name__)

CONNECT_S = 2.0  # timeout of opening a connection
STABLE_S = 1.0  # a session that lasts longer counts as working
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 0.5  # reconnect well before decode aborts the router's requests
MAX_REFUSED_S = 10.0  # between attempts at an incompatible router, until one side is upgraded


class RouterListener(Protocol):
    """The receiver of a session's events, which owns the requests on it. Methods are called in the
    event loop and must return at once."""

    def up(self, session: "RouterConnection") -> None:
        """Called when the session is open, so that messages can be sent on it."""

    def event(self, session: "RouterConnection", event: RequestEvent) -> None:
        """Called for each event of a request from the router, except tokens of unfinished
        choices."""

    def rows(self, session: "RouterConnection", rows: Iterable[TokenRow]) -> None:
        """Called with tokens of unfinished choices, of any requests on the session."""

    def down(self, session: "RouterConnection") -> None:
        """Called when the session has ended; messages sent on it may be lost."""


class RouterConnection:
    """Keeps a session with the router at `address` (host:port): connects, and reconnects after
    failures."""

    def __init__(
        self, address: str, access: Access, incarnation: bytes, listener: RouterListener
    ) -> None:
        """`incarnation` is the id of this gateway process, which the router gets; `listener` gets
        the router's events."""
        self.address = address
        self.channel: grpc.aio.Channel | None = None  # set while messages can be sent
        self.up_since = 0.0
        self.has_worked = False  # whether the last or current session worked
        self.protocol: int | None = None  # the router's version, once it has sent a message
        self.num_open = 0  # open requests; the listener updates it
        self._refusal = ""  # the last logged reason why the versions are incompatible
        self._recent = Recent()
        self._access = access
        self._incarnation = incarnation
        self._listener = listener
        self._outgoing: deque[GatewayMessage] = deque()
        self._to_send = asyncio.Event()
        self._task = asyncio.create_task(self._keep(), name=f"router {address}")

    @property
    def failure(self) -> "asyncio.Task[None]":
        """The task that keeps the session; it ends only if it fails unexpectedly, or by `close`."""
        return self._task

    async def close(self) -> None:
        """End the session, without further calls of the listener."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def load(self, now: float) -> float:
        """Return the load of the router: the gateway's open requests on it, and a decaying count of
        requests recently sent to it."""
        return self.num_open + self._recent.count(now)

    def count_sent(self, now: float) -> None:
        """Count a request sent to the router at `now`, for `load`."""
        self._recent.add(now)

    def send(self, message: GatewayMessage) -> None:
        """Queue a message for the router; it is dropped while no session is open."""
        if self.channel is not None:
            self._outgoing.append(message)
            self._to_send.set()

    async def _keep(self) -> None:
        backoff = FIRST_BACKOFF_S
        while True:
            self.has_worked = False
            try:
                async with self._access.open_channel(self.address, Role.ROUTER) as channel:
                    await _connect(channel)
                    await self._run(channel)
            except (grpc.aio.AioRpcError, OSError, TimeoutError, ServiceError) as error:
                self._note(error)
            max_backoff_s = MAX_REFUSED_S if self._refusal else MAX_BACKOFF_S
            backoff = FIRST_BACKOFF_S if self.has_worked else min(max_backoff_s, backoff * 2)
            await asyncio.sleep(backoff)

    def _note(self, error: Exception) -> None:
        """Log why the session ended. An incompatible protocol version is logged once, not after
        each attempt to reconnect."""
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
        text = str(reason or type(error).__name__)
        if not is_refusal(error):
            log.warning("no session with router %s: %s; reconnecting", self.address, text)
            self._refusal = ""
        elif text != self._refusal:
            log.warning("incompatible version of router %s: %s; retrying", self.address, text)
            self._refusal = text

    async def _run(self, channel: grpc.aio.Channel) -> None:
        loop = asyncio.get_running_loop()
        call = RouterStub(channel).Session()
        hello = GatewayHello(
            incarnation=self._incarnation, reads_rows=True, protocol=PROTOCOL_VERSION
        )
        await call.write(GatewayMessage(hello=hello))
        self.up_since = loop.time()
        self.protocol = None
        writer = asyncio.create_task(self._write(call))
        try:
            rows = RowReader()
            async for message in call:
                if self.protocol is None:
                    self._greeted(message.protocol, channel)
                self.has_worked |= bool(message.events)  # more than an open port
                for event in message.events:
                    if event.HasField("rows"):
                        self._listener.rows(self, rows.read(event.rows))
                    else:
                        self._listener.event(self, event)
            raise ConnectionError("the router ended the session")
        finally:
            self.channel = None
            self._outgoing.clear()
            self.has_worked |= loop.time() - self.up_since > STABLE_S
            if not self._task.cancelling():
                # Before any await: other code may close a session without a channel.
                self._listener.down(self)
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _greeted(self, protocol: int, channel: grpc.aio.Channel) -> None:
        """Open the session after the router's first message, which has its protocol version, and
        call the listener's `up`. Raises ServiceError if the version is too old or too new."""
        check_version(protocol, "gateway", f"router {self.address}")
        log.info("connected to router %s with protocol version %d", self.address, protocol)
        self.protocol, self._refusal, self.channel = protocol, "", channel
        self._listener.up(self)

    async def _write(self, call: "grpc.aio.StreamStreamCall[GatewayMessage, object]") -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            while self._outgoing:
                await call.write(self._outgoing.popleft())


async def _connect(channel: grpc.aio.Channel) -> None:
    """Wait until the gRPC channel is connected. Raises ConnectionError if the connection fails,
    TimeoutError after CONNECT_S."""
    async with asyncio.timeout(CONNECT_S):
        state = channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise ConnectionError("the connection to the router failed")
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)
