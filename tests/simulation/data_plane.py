"""The data connection between prefill and decode without threads: the real DataLink over pipes.

Records, credits and frames are those of engine/handoff/connection/link.py; callbacks replace only
its two threads. Connecting takes time, but both introductions then happen at the same instant.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pdserve.engine.handoff.connection import DataLink
from pdserve.engine.handoff.connection.connect import DIAL_S
from pdserve.engine.handoff.protocol import FrameError
from pdserve.engine.transport import Target, TransportRefused, WireClosed
from pdserve.engine.transport.tcp import TcpWire
from simulation.clock import Process, State
from simulation.network import END, POLL_S, Connection, Network, Pipe

log = logging.getLogger("pdserve.simulation")


class SimWire(TcpWire):
    """One end of a connection. A write is delivered in one piece, so no record is read in part."""

    def __init__(self, process: Process, slot_bytes: int, connection: Connection) -> None:
        self.process = process
        self.slot_bytes = slot_bytes
        self.deadline = None
        self.heard = process.time()
        self.link: SimLink | None = None
        self.other: SimWire | None = None  # during the introductions
        self._staging = None
        self._payload_buffer = None
        self._connection = connection
        client = connection.client is process
        self._out: Pipe = connection.up if client else connection.down
        into = connection.down if client else connection.up
        into.take = self._arrived
        connection.lost[process] = self._lost
        self._bytes = bytearray()
        self._over = False
        self._client = client

    @property
    def pending(self) -> bool:
        return bool(self._bytes)

    @property
    def readable(self) -> bool:
        return self.pending

    def take(self, size: int) -> bytes:
        if len(self._bytes) < size:
            self._over = True
            raise WireClosed("connection closed by the peer")
        data = bytes(self._bytes[:size])
        del self._bytes[:size]
        self.heard = self.process.time()
        return data

    def fill(self, out: memoryview) -> None:
        out[:] = self.take(len(out))

    def trust(self) -> None:
        self.deadline = None

    def write(self, *parts: bytes | memoryview) -> None:
        if self._over:
            raise WireClosed("connection lost")
        data = b"".join(parts)
        if self.other is None:
            self._out.transmit(data, bytes)
            return
        other = self.other
        network = self._connection.network
        if self._client and network.tamper is not None:
            tamper, network.tamper = network.tamper, None
            data = tamper(data)
        other._bytes += data
        if self._client and other.link is not None and not other.link.introduced:
            with self.process.world.inside(other.process):
                other.link.hear()

    def send_frame(
        self, record: bytes, slot: int, parts: Sequence[memoryview], taken: Callable[[], None]
    ) -> None:
        self.write(record, *parts)
        taken()

    def _arrived(self, data: Any) -> None:
        if isinstance(data, tuple):
            assert data[0] is END
            data[1].ended(self.process, "connection closed by the peer")
        elif self.link is not None and self.link.open:
            self._bytes += data
            self.link.arrived()

    def _lost(self, reason: str) -> None:
        self._over = True
        if self.link is not None:
            self.link.end(reason)

    def interrupt(self) -> None:
        self.close()

    def close(self) -> None:
        self._over = True
        self._connection.lost.pop(self.process, None)
        self._connection.close(self.process)


class SimLink(DataLink):
    """engine/handoff/connection/link.py DataLink without threads."""

    def __init__(self, wire: Any, transport: str, handler: Any) -> None:
        super().__init__(wire, transport, handler)
        self._sim: SimWire = wire
        self._sim.link = self
        self._process = wire.process
        self._pumping = False
        self.introduced = False

    def _start(self) -> None:
        if self._genuine:  # prefill: both ends are introduced
            near = self._sim
            assert near.other is not None
            far, near.other = near.other, None
            far.other = None
            self.introduced = True
            self._pump_soon()
            if far.link is not None:
                far.link._pump_soon()

    def hear(self) -> None:
        """Handle the arrival of the Hello at decode."""
        self.introduced = True
        self._guarded(self._check_hello)
        self._pump()

    def arrived(self) -> None:
        while self._sim.pending and self.open:
            self._guarded(self._read_and_credit)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (WireClosed, FrameError, TransportRefused) as err:
            self.end(str(err))
        except Exception:
            log.exception("a hand-off connection failed")
            self.end("internal error")

    def post(self, record: bytes) -> None:
        super().post(record)
        self._pump_soon()

    def push(self, *jobs: Any) -> None:
        super().push(*jobs)
        self._pump_soon()

    def slot_returned(self, slot: int, mark: bytes) -> bool:
        known = super().slot_returned(slot, mark)
        self._pump_soon()
        return known

    def close(self, reason: str = "closed locally") -> None:
        self.end(reason)

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            self._process.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        self._guarded(self._write_ready)

    def _write_ready(self) -> None:
        while (work := self._next_work()) is not None:
            self._write(work)


class SimTransport:
    """The part of a KvTransport that Sender and Receiver need. It is no subclass, because
    transports are discovered by class."""

    name = "tcp"
    preference = 100

    def __init__(self, network: Network, slot_bytes: int) -> None:
        self._network = network
        self._slot_bytes = slot_bytes
        self._process: Any = asyncio.get_running_loop()

    def check(self) -> None:
        """Do nothing: the transport is available."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def listen(self, incarnation: bytes, accept: Callable[[Any], None]) -> Any:
        address = f"{self._process.name}:6000"
        self._network.listen(address, self._process, accept)
        return _Listener(address)

    def dial(self, target: Target, timeout_s: float) -> SimWire:
        try:
            found = self._network.find(self._process, target.address)
        except TimeoutError:
            raise TransportRefused("timed out") from None
        if found is None:
            raise TransportRefused("connection refused")
        process, accept = found
        if process.state is State.STOPPED:
            raise TransportRefused("no welcome in time")
        connection = self._network.connect(self._process, process, pings=False)
        near = SimWire(self._process, self._slot_bytes, connection)
        far = SimWire(process, self._slot_bytes, connection)
        near.other, far.other = far, near
        with self._process.world.inside(process):
            accept(far)
        return near


class _Listener:
    def __init__(self, address: str) -> None:
        self.address = address

    def close(self) -> None:
        """Do nothing: the listener ends with its process."""


class DialThread:
    """Replaces a Sender's dialling threads with a callback once the peer is reachable, or 1 s
    later."""

    def __init__(self, process: Process, network: Network) -> None:
        self._process, self._network = process, network
        self._closed = False

    def submit(self, dial: Callable[..., None], target: Target, *args: Any) -> None:
        delay_s = sum(self._network.delay_s(self._process, self._process) for _ in range(3))
        run = partial(dial, target, *args)
        self._process.call_later(delay_s, self._try, run, target, self._process.time() + DIAL_S)

    def _try(self, run: Callable[[], None], target: Target, end: float) -> None:
        if self._closed:
            return
        if self._process.time() < end and not self._answers(target):
            self._process.call_later(POLL_S, self._try, run, target, end)
        else:
            run()

    def _answers(self, target: Target) -> bool:
        try:
            found = self._network.find(self._process, target.address)
        except TimeoutError:
            return False
        return found is None or found[0].state is State.RUNNING

    def shutdown(self) -> None:
        self._closed = True
