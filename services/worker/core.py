"""The part of a worker that runs on the event loop: the sessions of routers, and whether the worker
accepts new work.

Its methods post work to the engine thread through the runtime; results return to the loop by
`when_done`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc.aio

from pdserve.engine.api import ContextLengthExceeded, EngineError
from pdserve.protos import common_pb2 as pb
from pdserve.protos.worker_pb2 import SessionHello
from pdserve.services.common.errors import ServiceError, abort
from pdserve.services.common.rpc import IdsCollector, Outbox, VersionGate, host_of
from pdserve.services.worker.runtime import WorkerRuntime

log = logging.getLogger(__name__)
END_S = 1.0  # how long a drained worker waits for routers to read its last events

OutboxT = TypeVar("OutboxT", bound=Outbox[Any])
RuntimeT = TypeVar("RuntimeT", bound=WorkerRuntime)


@dataclass(eq=False, slots=True)
class RouterSession(Generic[OutboxT]):
    """A router's session with this worker, and the outbox of its events. Attempts that the session
    has started continue after it ends."""

    outbox: OutboxT
    peer: str  # gRPC's name of the router's connection
    lost: bool = False  # the stream is over


class WorkerCore(Generic[RuntimeT, OutboxT]):
    """The attempts at requests that run in one worker process. The cores of prefill and decode
    workers derive from it.

    Subclasses clear `_empty` when they take an attempt, and set it when no attempt remains.
    """

    def __init__(self, new_outbox: Callable[[], OutboxT]) -> None:
        self.num_stale = 0  # messages about unknown attempts
        self._new_outbox = new_outbox
        self._runtime: RuntimeT | None = None
        self._sessions: set[RouterSession[OutboxT]] = set()
        self._session_closed = asyncio.Event()
        self._versions = VersionGate("worker")
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self.in_fleet = asyncio.Event()  # a router has opened a session: it sends work here

    def attach(self, runtime: RuntimeT) -> None:
        """Accept work from now on, with the runtime of the loaded model."""
        self._runtime = runtime

    async def drain(self) -> None:
        """Refuse new work; return when all work is done and the routers have read the last events.

        The sessions end before the worker deregisters from its routers, so that no router considers
        it lost before having read those events.
        """
        self._draining = True
        await self._empty.wait()
        await self._end_sessions()

    async def serve(
        self,
        commands: AsyncIterator[Any],
        carry_out: Callable[[RouterSession[OutboxT], Any, IdsCollector], None],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncGenerator[list[Any], None]:
        """Serve a router's Session call: process its commands, and yield batches of events for it.
        The first command must be `hello`. `carry_out` receives the session, each later command
        except `ids_part`, and the collector of the token ids that the router sends in parts before
        a command."""
        if self._runtime is None:
            await abort(context, ServiceError(pb.UNAVAILABLE, "the model is still loading"))
        session = RouterSession(self._new_outbox(), context.peer())
        self._sessions.add(session)
        reader = asyncio.create_task(self._read(commands, carry_out, session))
        reader.add_done_callback(lambda _: session.outbox.close())
        try:
            async for events in session.outbox:
                yield events
            if reader.done():
                await reader  # an error of the reader ends the stream
        except ServiceError as error:
            await abort(context, error)
        finally:
            reader.cancel()
            session.lost = True
            session.outbox.close()
            self._sessions.discard(session)
            self._session_closed.set()
            self._session_lost(session)

    async def _read(
        self,
        commands: AsyncIterator[Any],
        carry_out: Callable[[RouterSession[OutboxT], Any, IdsCollector], None],
        session: RouterSession[OutboxT],
    ) -> None:
        ids = IdsCollector()
        first = await anext(commands, None)
        if first is None:
            return
        if not first.HasField("hello"):
            text = "the first command of a Session call must be `hello`"
            raise ServiceError(pb.INVALID_ARGUMENT, text, "hello")
        self._opened(session, first.hello)
        async for command in commands:
            if command.HasField("ids_part"):
                ids.collect(command.ids_part)
            else:
                carry_out(session, command, ids)

    def _opened(self, session: RouterSession[OutboxT], hello: SessionHello) -> None:
        """Process `hello`, a session's first command. Raises ServiceError if the router's protocol
        version is too old or too new."""
        self._versions.check(hello.protocol, f"router at {host_of(session.peer)}")
        self.in_fleet.set()
        log.debug("router %s opened a session with this worker", hello.router_incarnation.hex())

    def _session_lost(self, session: RouterSession[OutboxT]) -> None:
        """Handle the end of a session. Does nothing by default, so the session's attempts continue;
        subclasses may override it."""

    async def _end_sessions(self) -> None:
        """End all sessions after their queued events are sent; wait for that at most END_S."""
        ending = set(self._sessions)
        for session in ending:
            session.outbox.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                while ending & self._sessions:
                    self._session_closed.clear()
                    await self._session_closed.wait()


def when_done(future: "Future[Any]", callback: Callable[["Future[Any]"], None]) -> None:
    """Have the event loop call callback(future) when the future is done. Callbacks run in the order
    in which the engine thread completes their futures."""
    loop = asyncio.get_running_loop()

    def done(future: "Future[Any]") -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback, future)

    future.add_done_callback(done)


def service_error(error: EngineError) -> ServiceError:
    """Convert an engine's refusal of a request to the error that the router and the client
    receive."""
    too_long = isinstance(error, ContextLengthExceeded)
    code = pb.CONTEXT_LENGTH_EXCEEDED if too_long else pb.INVALID_ARGUMENT
    return ServiceError(code, str(error), error.param)
