"""The interface of a KV transport, which opens wires between a prefill and a decode process; and
the choice of the transports that a process uses.

A wire is a stream socket for records plus a transport-specific way to move a frame's payload
through numbered slots. A transport never sees a ticket, a block or a key: the hand-off owns these
and uses wires in engine/handoff/connection/link.py. A new transport is a KvTransport subclass in a
module of this folder or of its subfolders, found by discovery.
"""

import contextlib
import errno
import importlib
import logging
import os
import pkgutil
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

from pdserve.engine.kv import Pages
from pdserve.engine.transport.device import Copy, Device

log = logging.getLogger(__name__)

IOV_MAX = os.sysconf("SC_IOV_MAX")
SLOTS = 8  # frames in flight per connection: its credit, and the size of its window
DEVICE_SLOT_BYTES = 32 << 20  # of a window on a device
READ_AHEAD_BYTES = 1 << 10
ACCEPT_AGAIN_S = 0.1  # pause after accept failed because no file descriptor was free

Received = TypeVar("Received", bytes, int)


class TransportRefused(Exception):
    """Raised if a transport cannot be used, or cannot reach a decode process; the text says why."""


class WireClosed(Exception):
    """Raised on a read or write if the connection has ended, or if the peer did not prove itself in
    time."""


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """The settings of all transports of a process: where it listens, and how large payloads may
    be."""

    data_bind: str = "127.0.0.1:0"  # tcp
    shm_dir: str = ""  # shm: directory of unix sockets; empty turns shm off
    slot_bytes: int = 1 << 20  # the largest payload; both sides derive it from their KvSpec
    device: Callable[[], Device] | None = None  # cuda_ipc: opens the pool's device; None: a CPU
    device_slot_bytes: int = DEVICE_SLOT_BYTES  # cuda_ipc: the largest payload


@dataclass(frozen=True, slots=True)
class Target:
    """A decode process that prefill connects to: its TCP address and incarnation, both from a
    ticket."""

    address: str  # host:port of its tcp listener; empty if it has none
    incarnation: bytes


class DeviceSink(Protocol):
    """A slot in device memory at prefill, to be filled from the block pool on the same device."""

    def copy_out(self, pages: Pages, key: bytes) -> Copy:
        """Begin to copy pages of the pool, and their keyed hash, into the slot. Raises
        DeviceError."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A signed frame that is ready to be sent."""

    record: bytes  # signed
    parts: list[memoryview]  # the payload; empty if it is in the sink


# The frame for a slot, or None if it is no longer needed; its parts stay valid while the context
# lasts.
FrameJob = Callable[[int, DeviceSink | None], AbstractContextManager[Frame | None]]


class DeviceSource(Protocol):
    """A slot in device memory at decode, which holds a frame's payload or will soon hold it."""

    def ready(self) -> bool:
        """Return whether prefill's copy into the slot is done; never waits. Raises DeviceError."""

    def copy_in(self, pages: Pages, key: bytes) -> Copy:
        """Begin to copy the slot's payload into pages of the pool, after the event `pages.ready`.
        Raises DeviceError."""


Payload = memoryview | DeviceSource


class Wire(ABC):
    """One connection between a prefill and a decode process. One thread reads and one thread
    writes.

    A `direct` wire moves payloads from pool to pool on a device: its slots are DeviceSinks or
    DeviceSources, and the bytes never pass the host.
    """

    direct: ClassVar[bool] = False

    def __init__(self, sock: socket.socket, slot_bytes: int) -> None:
        self.sock = sock
        self.slot_bytes = slot_bytes
        self.deadline: float | None = None  # of the reads, until the peer has proven itself
        self.heard = time.monotonic()
        self.host = _host(sock)  # of the peer; empty on a unix socket
        self._ahead = b""  # received, but not taken yet
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @property
    def readable(self) -> bool:
        """Whether bytes have arrived that are not taken yet, or the peer has closed, so a read does
        not wait."""
        return bool(self._ahead) or bool(self._poll.poll(0))

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes of the stream, waiting for them if needed. Raises
        WireClosed."""
        while len(self._ahead) < size:
            self._ahead += self._received(partial(self.sock.recv, READ_AHEAD_BYTES))
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data

    def fill(self, out: memoryview) -> None:
        """Fill the buffer `out` with the next bytes of the stream, waiting for them if needed.
        Raises WireClosed."""
        filled = min(len(out), len(self._ahead))
        out[:filled] = self.take(filled)
        while filled < len(out):
            filled += self._received(partial(self.sock.recv_into, out[filled:]))

    def _received(self, receive: Callable[[], Received]) -> Received:
        """Call `receive`, a read of the socket, until it returns data or the number of bytes read.
        Raises WireClosed if the connection has ended or the deadline has passed."""
        while True:
            if self.deadline is not None:
                remaining_s = self.deadline - time.monotonic()
                if remaining_s <= 0:
                    raise WireClosed("the peer took too long to introduce itself")
                self.sock.settimeout(remaining_s)
            try:
                received = receive()
            except TimeoutError:
                continue
            except OSError as err:
                raise WireClosed(f"connection lost: {err.strerror or err}") from None
            if not received:
                raise WireClosed("connection closed by the peer")
            self.heard = time.monotonic()
            return received

    def trust(self) -> None:
        """Lift the read deadline, since the peer has proven itself."""
        self.deadline = None
        self.sock.settimeout(None)

    def write(self, *parts: bytes | memoryview) -> None:
        """Send all parts, in order; waits until the socket has taken them. Raises WireClosed."""
        views = deque(memoryview(part) for part in parts if len(part))
        while views:
            self.write_some(views)

    def write_some(self, views: deque[memoryview], flags: int = 0) -> None:
        """Send as many bytes of the views, none of them empty, as the socket takes in one call, and
        remove those bytes from `views`. Raises WireClosed, and with MSG_DONTWAIT also
        BlockingIOError."""
        try:
            sent = self.sock.sendmsg(islice(views, IOV_MAX), [], flags)
        except BlockingIOError:
            raise
        except OSError as err:
            raise WireClosed(f"connection lost: {err.strerror or err}") from None
        while views and sent >= len(views[0]):
            sent -= len(views.popleft())
        if sent:
            views[0] = views[0][sent:]

    @abstractmethod
    def setup(self) -> None:
        """At decode, do the transport's handshake, which precedes the first record. Raises
        WireClosed."""

    @abstractmethod
    def proof(self) -> bytes:
        """Return 16 bytes that are equal at both ends only if payloads of prefill arrive at decode.
        Raises TransportRefused."""

    def window(self) -> bytes:
        """At decode, return the data with which a trusted peer opens the window of slots; empty if
        it needs none. Raises TransportRefused."""
        return b""

    def open_window(self, data: bytes) -> None:
        """At prefill, open decode's window of slots with the data that decode's `window` returned.
        Raises TransportRefused."""
        raise TransportRefused("decode sent a device window, but this transport uses none")

    @property
    def writable(self) -> bool:
        """At prefill, whether slots can be filled. If false, they can be filled after
        `open_window`."""
        return True

    def sink(self, slot: int) -> DeviceSink | None:
        """At prefill, return the slot of a direct wire, to be filled before `send_frame`; None for
        other wires."""
        return None

    @abstractmethod
    def send_frame(
        self,
        record: bytes,
        slot: int,
        parts: Sequence[memoryview],
        release_parts: Callable[[], None],
    ) -> None:
        """At prefill, send a frame's record, and its payload through the slot.

        Calls `release_parts` as soon as `parts` are no longer read, within a few milliseconds
        whatever the peer does. Raises WireClosed.
        """

    @abstractmethod
    def payload(self, slot: int, size: int) -> Payload:
        """At decode, return the payload of the frame whose record was just read. It stays unchanged
        until the frame is credited or answered, or the next record is read."""

    @abstractmethod
    def skip_payload(self, slot: int, size: int) -> None:
        """At decode, skip the payload of the frame whose record was just read."""

    def interrupt(self) -> None:
        """Shut the socket down, which wakes every thread that reads from it or writes to it; any
        thread may call it."""
        with contextlib.suppress(OSError):  # no longer connected: the threads have woken already
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket and the window of slots; no thread may still use them."""
        self.sock.close()


def _host(sock: socket.socket) -> str:
    """Return the IP address of the socket's peer; empty for a unix socket. Raises OSError if the
    peer has gone."""
    return "" if sock.family == socket.AF_UNIX else str(sock.getpeername()[0])


class WindowWriter(Wire):
    """Prefill's end of a connection whose payloads pass through a window of shared memory, not the
    socket."""

    def setup(self) -> None:
        raise WireClosed("prefill accepts no connections")

    def payload(self, slot: int, size: int) -> Payload:
        raise WireClosed("decode does not send frames")

    def skip_payload(self, slot: int, size: int) -> None:
        raise WireClosed("decode does not send frames")


class WindowReader(Wire):
    """Decode's end of a connection whose payloads pass through a window of shared memory, not the
    socket."""

    def send_frame(
        self,
        record: bytes,
        slot: int,
        parts: Sequence[memoryview],
        release_parts: Callable[[], None],
    ) -> None:
        raise WireClosed("decode does not send frames")

    def skip_payload(self, slot: int, size: int) -> None:
        """Do nothing: the socket's stream has no part of the payload."""


class Listener:
    """A listening socket and the thread that accepts its connections, until `close`.

    If the process has no file descriptor or thread left for a connection, the thread tries again
    until it has.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        accepted: Callable[[socket.socket], None],
        cleanup: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self._sock = sock
        self._accepted = accepted
        self._cleanup = cleanup
        self._closed = threading.Event()
        self._last_failure = ""  # why the last try failed
        self._thread = threading.Thread(target=self._run, name="kv-accept")
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()
        self._cleanup()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                peer, _ = self._sock.accept()
            except OSError as err:
                if not self._closed.is_set() and err.errno != errno.ECONNABORTED:
                    self._failed(err.strerror or str(err))
                    self._closed.wait(ACCEPT_AGAIN_S)
                continue
            try:
                self._accepted(peer)
            except (OSError, RuntimeError) as err:  # the peer has gone, or no thread is available
                peer.close()
                self._failed(str(err))
                continue
            self._last_failure = ""

    def _failed(self, reason: str) -> None:
        """Log why a connection could not be accepted, once for each reason until one succeeds."""
        if reason != self._last_failure:
            self._last_failure = reason
            log.warning("cannot accept a connection on %s: %s", self.address, reason)


class KvTransport(ABC):
    """A way to move KV from prefill to decode processes; a subclass is one transport."""

    name: ClassVar[str]
    preference: ClassVar[int]  # `auto` tries the lowest first

    def __init__(self, options: TransportOptions) -> None:
        self.options = options

    @classmethod
    def applies(cls, options: TransportOptions) -> bool:
        """Return whether the choice `auto` includes this transport, given the process's options."""
        return True

    def check(self) -> None:  # noqa: B027
        """Check that this process and machine have what the transport needs. Raises
        TransportRefused."""

    def close(self) -> None:  # noqa: B027
        """At prefill, release what `dial` allocated; `dial` must not be called afterwards."""

    @abstractmethod
    def listen(self, incarnation: bytes, accept: Callable[[Wire], None]) -> Listener:
        """At decode, open a listener that passes the wire of each new connection to `accept`.
        Raises OSError, or TransportRefused if this machine or the options do not support the
        transport."""

    @abstractmethod
    def dial(self, target: Target, timeout_s: float) -> Wire:
        """At prefill, connect to a decode process and return the wire. Raises TransportRefused."""


def transports() -> dict[str, type[KvTransport]]:
    """Import the transport modules; return transport name -> class, in the order in which `auto`
    tries them."""
    for module in pkgutil.walk_packages([str(Path(__file__).parent)], f"{__package__}."):
        importlib.import_module(module.name)
    classes = KvTransport.__subclasses__()
    return {cls.name: cls for cls in sorted(classes, key=lambda cls: cls.preference)}


def make_transports(choice: str, options: TransportOptions) -> list[KvTransport]:
    """Return the transports that a process may use, best first. `choice` is the name of one, or
    `auto` for all that apply to the options.

    Raises ValueError for an unknown name.
    """
    by_name = transports()
    if choice != "auto" and choice not in by_name:
        raise ValueError(
            f"unknown transport {choice!r}; known transports: auto, {', '.join(by_name)}"
        )
    if choice != "auto":
        return [by_name[choice](options)]
    return [cls(options) for cls in by_name.values() if cls.applies(options)]
