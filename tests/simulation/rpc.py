"""gRPC between simulated processes: the part of grpc.aio that the services use, over a Network.

Messages are serialized as on the wire; the generated stubs and servicers are the real ones.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata

from simulation.clock import Process
from simulation.network import END, Connection, Network, Pipe


class Aborted(Exception):
    """Raised when a servicer ends its call with an error."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any) -> None:
        super().__init__(details)
        self.code, self.details, self.trailing = code, details, trailing


def unavailable(details: str) -> AioRpcError:
    return AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details=details)


class Inbox:
    """Messages of one direction, for one reader."""

    def __init__(self) -> None:
        self._items: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._over = False
        self._error: AioRpcError | None = None

    def put(self, item: bytes) -> None:
        self._items.append(item)
        self._wake.set()

    def end(self, error: AioRpcError | None = None) -> None:
        if not self._over:
            self._over, self._error = True, error
            self._wake.set()

    @property
    def error(self) -> AioRpcError | None:
        return self._error

    async def get(self) -> bytes | None:
        """Return the next message, or None at a normal end. Raises AioRpcError."""
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._over:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._items.popleft()


class Call:
    """The client's end of one stream."""

    def __init__(
        self, network: Network, process: Process, address: str, path: str,
        pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any],
    ) -> None:  # fmt: skip
        self._network, self._process = network, process
        self._pack, self._unpack = pack, unpack
        self._inbox = Inbox()
        self._connection: Connection | None = None
        self._task = process.create_task(self._connect(address, path), name=f"call {path}")

    async def _connect(self, address: str, path: str) -> None:
        try:
            server_process, server = await self._network.dial(self._process, address)
        except ConnectionRefusedError as error:
            self._inbox.end(unavailable(str(error)))
            return
        connection = self._network.connect(self._process, server_process, pings=True)
        self._connection = connection
        connection.lost[self._process] = lambda reason: self._inbox.end(unavailable(reason))
        connection.down.take = self._take
        server.accept(connection, path)

    def _take(self, item: Any) -> None:
        if not isinstance(item, tuple):
            self._inbox.put(item)
        elif item[0] is END:
            item[1].ended(item[2], "connection closed by the peer")
        else:
            if self._connection is not None:
                self._connection.lost.pop(self._process, None)
            self._inbox.end(item[1])

    async def write(self, message: Any) -> None:
        await asyncio.shield(self._task)
        if self._inbox.error is not None:
            raise self._inbox.error
        assert self._connection is not None
        self._connection.up.transmit(message, self._pack)

    def cancel(self) -> None:
        self._task.cancel()
        self._inbox.end(
            AioRpcError(grpc.StatusCode.CANCELLED, Metadata(), Metadata(), details="cancelled here")
        )
        if self._connection is not None:
            self._connection.lost.pop(self._process, None)
            self._connection.close(self._process)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (item := await self._inbox.get()) is not None:
            yield self._unpack(item)


class Channel:
    """The result of open_channel."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._process: Any = asyncio.get_running_loop()
        self._state = grpc.ChannelConnectivity.IDLE
        self._changed = asyncio.Event()
        self._calls: list[Call] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        if self._task is not None:
            self._task.cancel()
        for call in self._calls:
            call.cancel()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        if try_to_connect and self._task is None:
            self._state = grpc.ChannelConnectivity.CONNECTING
            self._task = self._process.create_task(self._try(), name="connect")
        return self._state

    async def _try(self) -> None:
        try:
            await self._network.dial(self._process, self._address)
            self._state = grpc.ChannelConnectivity.READY
        except ConnectionRefusedError:
            self._state = grpc.ChannelConnectivity.TRANSIENT_FAILURE
        self._changed.set()

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        while self._state is last:
            await self._changed.wait()
            self._changed.clear()

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Any:
        def invoke(**_: Any) -> Call:
            call = Call(
                self._network, self._process, self._address, path,
                request_serializer, response_deserializer,
            )  # fmt: skip
            self._calls.append(call)
            return call

        return invoke

    def unary_unary(self, *_: Any, **__: Any) -> Any:
        return None  # no such method is called here

    unary_stream = stream_unary = unary_unary


class Context:
    """A servicer's view of its call."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        raise Aborted(code, details, trailing)

    def peer(self) -> str:
        return "simulated"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def trailing_metadata(self) -> tuple[()]:
        return ()


class Server:
    """Replaces GrpcServer.server: servicers register with it and receive calls."""

    def __init__(self, process: Process, network: Network) -> None:
        self._process = process
        self._network = network
        self._handlers: dict[str, Any] = {}
        self._calls: dict[asyncio.Task[None], Connection] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Do nothing: the registered method handlers contain the same."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def accept(self, connection: Connection, path: str) -> None:
        world = self._process.world
        world.at(world.now, self._process, self._accept, connection, path)

    def _accept(self, connection: Connection, path: str) -> None:
        inbox = Inbox()
        task = self._process.create_task(self._serve(connection, inbox, path), name=f"serve {path}")
        self._calls[task] = connection
        task.add_done_callback(lambda task: self._calls.pop(task, None))

        def lost(reason: str) -> None:
            inbox.end()
            task.cancel()

        def take(item: Any) -> None:
            if isinstance(item, tuple):
                item[1].ended(item[2], "closed by the peer")
            else:
                inbox.put(item)

        connection.lost[self._process] = lost
        connection.up.take = take

    async def _serve(self, connection: Connection, inbox: Inbox, path: str) -> None:
        handler = self._handlers[path]

        async def requests() -> AsyncIterator[Any]:
            while (item := await inbox.get()) is not None:
                yield handler.request_deserializer(item)

        error: AioRpcError | None = None
        down: Pipe = connection.down
        try:
            async for response in handler.stream_stream(requests(), Context()):
                down.transmit(response, handler.response_serializer)
        except Aborted as aborted:
            error = AioRpcError(
                aborted.code, Metadata(), Metadata(*aborted.trailing), details=aborted.details
            )
        connection.lost.pop(self._process, None)
        down.send(("status", error))

    async def stop(self, grace_s: float | None) -> None:
        """Refuse new calls, give running ones the grace period, then cut them."""
        self._network.unlisten(self._process)
        if self._calls and grace_s:
            await asyncio.wait(list(self._calls), timeout=grace_s)
        for task, connection in list(self._calls.items()):
            connection.close(self._process)
            task.cancel()
        if self._calls:
            await asyncio.wait(list(self._calls))
