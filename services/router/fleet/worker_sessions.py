"""Sessions from the router to its workers: one gRPC stream for each life of a worker process,
reopened when it breaks.

In each session, a reader passes the worker's events on and never waits, and a writer sends the
commands in the session's outbox. When a session breaks, its unsent commands are dropped, because
their requests are resumed or placed again. Cancels issued while no session is open are sent first
in the next one.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from enum import Enum
from typing import Any, Protocol

import grpc.aio

from pdserve.protos import worker_pb2 as wire
from pdserve.protos.fleet_pb2 import DECODE
from pdserve.protos.worker_pb2_grpc import DecodeStub, PrefillStub
from pdserve.services.common.auth.access import Access
from pdserve.services.common.auth.certificates import Role
from pdserve.services.common.rpc import PROTOCOL_VERSION, Outbox, RowReader, TokenRow, is_refusal
from pdserve.services.router.fleet.worker import Worker

log = logging.getLogger(__name__)

PROBE_S = 0.5
RETRY_S = 0.1  # doubled with every session that breaks soon after its start
MAX_RETRY_S = 2.0
SOON_S = 1.0
MAX_PENDING_CANCELS = 1024  # cancels; workers end the attempts of dropped ones by themselves
Command = wire.DecodeCommand | wire.PrefillCommand
Event = wire.DecodeEvent | wire.PrefillEvent


class SessionListener(Protocol):
    """Interface to the receiver of a worker session's events. Each method is called on the event
    loop and returns at once."""

    def up(self, worker: Worker) -> None:
        """Process the opening of a session: commands can be sent to the worker."""

    def down(self, worker: Worker) -> None:
        """Process the break of a session: no commands can be sent to the worker. A call of `broken`
        or `refused` follows."""

    def broken(self, worker: Worker) -> None:
        """Process that a worker whose session broke can be reached again; messages of that session
        may be lost."""

    def refused(self, worker: Worker) -> None:
        """Process that the worker's port refuses connections, which means that the worker is
        dead."""

    def event(self, worker: Worker, event: Event) -> None:
        """Process an event that the worker sent."""

    def rows(self, worker: Worker, rows: Iterable[TokenRow]) -> None:
        """Process tokens of unfinished choices that a decode worker sent as rows, the compact
        form."""


class ProbeResult(Enum):
    """Result of a test connection to a worker's port: opened, refused, or no answer in time."""

    OPEN = "open"
    REFUSED = "refused"
    SILENT = "silent"


class WorkerSession:
    """The router's session with one worker, which `run` opens again whenever it breaks. `run` ends
    only when the worker's port refuses a connection, or by cancellation."""

    def __init__(
        self, worker: Worker, access: Access, incarnation: bytes, listener: SessionListener
    ) -> None:
        self._worker = worker
        self._address = worker.address
        self._access = access
        self._hello = wire.SessionHello(
            router_incarnation=incarnation, reads_rows=True, protocol=PROTOCOL_VERSION
        )
        self._listener = listener
        self._outbox: Outbox[Command] | None = None
        # Cancels to send in the next session.
        self._pending_cancels: deque[Command] = deque(maxlen=MAX_PENDING_CANCELS)
        self._unsettled = False  # a session broke and `broken` has not been called

    def send(self, command: Command) -> None:
        if self._outbox is not None:
            self._outbox.put(command)
        elif command.HasField("cancel") and not command.cancel.choices:
            self._pending_cancels.append(command)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        retry_s = RETRY_S
        refusal = ""  # last logged: a worker of another version repeats it each time
        while True:
            session_start = loop.time()
            try:
                await self._session()
            except (grpc.aio.AioRpcError, OSError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                refused = is_refusal(error)
                if not refused or reason != refusal:
                    log.log(
                        logging.INFO if self._worker.draining else logging.WARNING,
                        "the session with worker %s failed; the router reopens it unless the "
                        "worker's port refuses connections: %s",
                        self._address,
                        reason,
                    )
                refusal = str(reason) if refused else ""
            except Exception:
                log.exception(
                    "the session with worker %s failed unexpectedly; the router reopens it",
                    self._address,
                )
            probe_result = await probe(self._address)
            if probe_result is ProbeResult.REFUSED:
                # Called from outside this task, because the listener cancels it.
                loop.call_soon(self._listener.refused, self._worker)
                return
            if probe_result is ProbeResult.OPEN:
                self._settle()
            await asyncio.sleep(retry_s)
            broke_soon = loop.time() - session_start < SOON_S + retry_s
            retry_s = min(MAX_RETRY_S, 2 * retry_s) if broke_soon else RETRY_S

    def _settle(self) -> None:
        """Call the listener's `broken` for a session that broke, once the worker can be reached
        again. Whether a worker that stays silent is dead is the fleet's decision."""
        if self._unsettled:
            self._unsettled = False
            self._listener.broken(self._worker)

    async def _session(self) -> None:
        decodes = self._worker.role == DECODE
        role = Role.DECODE if decodes else Role.PREFILL
        async with self._access.open_channel(self._address, role) as channel:
            call: Any
            if decodes:
                call = DecodeStub(channel).Session()
                await call.write(wire.DecodeCommand(hello=self._hello))
            else:
                call = PrefillStub(channel).Session()
                await call.write(wire.PrefillCommand(hello=self._hello))
            self._settle()
            outbox = self._outbox = Outbox[Command]()
            while self._pending_cancels:
                outbox.put(self._pending_cancels.popleft())
            self._unsettled = True
            writer = asyncio.create_task(_write(call.write, outbox))
            log.info("the router opened its session with worker %s", self._address)
            self._listener.up(self._worker)
            try:
                rows = RowReader()
                async for message in call:
                    for event in message.events:
                        self._deliver(event, rows)
            finally:
                self._outbox = None
                self._listener.down(self._worker)
                writer.cancel()
                call.cancel()
                with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                    await writer

    def _deliver(self, event: Event, rows: RowReader) -> None:
        """Pass an event of the worker to the listener. `rows`: the reader of this session's token
        rows."""
        if isinstance(event, wire.DecodeEvent) and event.HasField("rows"):
            self._listener.rows(self._worker, rows.read(event.rows))
        else:
            self._listener.event(self._worker, event)


class WorkerSessions:
    """The router's sessions with all workers, and the tasks that run them."""

    def __init__(self, access: Access, incarnation: bytes, listener: SessionListener) -> None:
        self._access = access
        self._incarnation = incarnation
        self._listener = listener
        self._sessions: dict[bytes, tuple[WorkerSession, asyncio.Task[None]]] = {}

    def open(self, worker: Worker) -> None:
        """Open a session with a worker and reopen it whenever it breaks; no effect if the worker
        has one."""
        if worker.incarnation not in self._sessions:
            session = WorkerSession(worker, self._access, self._incarnation, self._listener)
            name = f"session {worker.address}"
            self._sessions[worker.incarnation] = (
                session,
                asyncio.create_task(session.run(), name=name),
            )

    def send(self, worker: Worker, command: Command) -> None:
        """Queue a command for a worker. While the worker's session is down, a cancel of a whole
        attempt is kept for the next session, and any other command is dropped."""
        if worker.incarnation in self._sessions:
            self._sessions[worker.incarnation][0].send(command)

    def close(self, worker: Worker) -> None:
        """End the session with a worker for good."""
        if worker.incarnation in self._sessions:
            self._sessions.pop(worker.incarnation)[1].cancel()

    async def close_all(self) -> None:
        """End the sessions with all workers, and wait until they have ended."""
        tasks = [task for _, task in self._sessions.values()]
        self._sessions.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _write(
    write: Callable[[Command], Awaitable[None]],
    outbox: Outbox[Command],
) -> None:
    async for batch in outbox:
        for command in batch:
            await write(command)


async def probe(address: str) -> ProbeResult:
    """Test whether a worker's port accepts connections, by connecting and disconnecting. The result
    SILENT proves neither that the worker lives nor that it is dead."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return ProbeResult.REFUSED
    except (OSError, TimeoutError):
        return ProbeResult.SILENT
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return ProbeResult.OPEN
