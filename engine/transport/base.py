"""The interface of a KV transport, which opens wires between a prefill and a decode process; the
choice of a transport.

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
    """Raised if this transport cannot reach that peer; the text says why."""


class WireClosed(Exception):
    """Raised if the connection has ended or its peer exceeded the deadline."""


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Where a process listens and finds its peers."""

    data_bind: str = "127.0.0.1:0"  # tcp
    shm_dir: str = ""  # shm: directory of unix sockets; empty turns shm off
    slot_bytes: int = 1 << 20  # the largest payload; both sides derive it from their KvSpec
    device: Callable[[], Device] | None = None  # cuda_ipc: opens the pool's device; None: a CPU
    device_slot_bytes: int = DEVICE_SLOT_BYTES  # cuda_ipc: the largest payload


@dataclass(frozen=True, slots=True)
class Target:
    """A decode process, as a ticket names it."""

    address: str  # host:port of its tcp listener; empty if it has none
    boot: bytes


class DeviceSink(Protocol):
    """prefill: a slot on the device, to be filled from the pool on the device."""

    def copy_out(self, pages: Pages, key: bytes) -> Copy:
        """Begin to copy the pages into the slot. Raises DeviceError."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame to send."""

    record: bytes  # signed
    parts: list[memoryview]  # the payload; empty if it is in the sink


# The frame for a slot, or None if it is no longer needed; its parts stay valid while the context
# lasts.
FrameJob = Callable[[int, DeviceSink | None], AbstractContextManager[Frame | None]]


class DeviceSource(Protocol):
    """decode: a slot on the device that holds a payload, or soon will."""

    def ready(self) -> bool:
        """Return whether prefill's copy is done; never waits. Raises DeviceError."""

    def copy_in(self, pages: Pages, key: bytes) -> Copy:
        """Begin to copy the slot into the pool, after `pages.ready`. Raises DeviceError."""


Payload = memoryview | DeviceSource


class Wire(ABC):
    """One connection. Reads happen on one thread and writes on one thread.

    A `direct` wire moves payloads from pool to pool on a device: its slots are DeviceSinks or
    DeviceSources, and the host never sees the bytes.
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
        """Whether a read would not wait for its first byte."""
        return bool(self._ahead) or bool(self._poll.poll(0))

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes, and buffer more if available. Raises WireClosed."""
        while len(self._ahead) < size:
            self._ahead += self._received(partial(self.sock.recv, READ_AHEAD_BYTES))
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data

    def fill(self, out: memoryview) -> None:
        """Fill `out` from the stream. Raises WireClosed."""
        filled = min(len(out), len(self._ahead))
        out[:filled] = self.take(filled)
        while filled < len(out):
            filled += self._received(partial(self.sock.recv_into, out[filled:]))

    def _received(self, receive: Callable[[], Received]) -> Received:
        """Call `receive` until it returns bytes or their number, not 0. Raises WireClosed."""
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
        """Lift the deadline: the peer has proven itself."""
        self.deadline = None
        self.sock.settimeout(None)

    def write(self, *parts: bytes | memoryview) -> None:
        """Send all parts, in order. Raises WireClosed."""
        views = deque(memoryview(part) for part in parts if len(part))
        while views:
            self.write_some(views)

    def write_some(self, views: deque[memoryview], flags: int = 0) -> None:
        """Send some of the views, all non-empty, and remove the sent bytes from them. Raises
        WireClosed; BlockingIOError with MSG_DONTWAIT."""
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
        """decode: read what precedes the first record. Raises WireClosed."""

    @abstractmethod
    def proof(self) -> bytes:
        """Return 16 bytes that both ends see only if payloads arrive. Raises TransportRefused."""

    def window(self) -> bytes:
        """decode: return what the peer, now trusted, needs to open the window; empty if it needs
        nothing. Raises TransportRefused."""
        return b""

    def open_window(self, data: bytes) -> None:
        """prefill: open the window by the data of decode's `window`. Raises TransportRefused."""
        raise TransportRefused("this transport does not use a window")

    @property
    def writable(self) -> bool:
        """prefill: whether slots can be filled; if false, only after `open_window`."""
        return True

    def sink(self, slot: int) -> DeviceSink | None:
        """prefill, direct: return the slot, to be filled before `send_frame`."""
        return None

    @abstractmethod
    def send_frame(
        self,
        record: bytes,
        slot: int,
        parts: Sequence[memoryview],
        release_parts: Callable[[], None],
    ) -> None:
        """prefill: send a frame's record and its payload through the slot. `release_parts` is
        called as soon as the parts are no longer needed, within a few milliseconds whatever the
        peer does. Raises WireClosed."""

    @abstractmethod
    def payload(self, slot: int, size: int) -> Payload:
        """decode: return the payload of the record just read. It stays unchanged until the frame is
        credited or answered, or the next record is read."""

    @abstractmethod
    def skip_payload(self, slot: int, size: int) -> None:
        """decode: skip the payload of the record just read."""

    def interrupt(self) -> None:
        """Wake every thread that reads or writes here; any thread may call it."""
        with contextlib.suppress(OSError):  # no longer connected: the threads have woken already
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket and the window; no thread may be using them."""
        self.sock.close()


def _host(sock: socket.socket) -> str:
    """Return the peer's address; empty on a unix socket. Raises OSError if the peer has gone."""
    return "" if sock.family == socket.AF_UNIX else str(sock.getpeername()[0])


class WindowWriter(Wire):
    """prefill's end of a connection whose payloads pass through a window, not the stream."""

    def setup(self) -> None:
        raise WireClosed("prefill accepts no connections")

    def payload(self, slot: int, size: int) -> Payload:
        raise WireClosed("decode does not send frames")

    def skip_payload(self, slot: int, size: int) -> None:
        raise WireClosed("decode does not send frames")


class WindowReader(Wire):
    """decode's end of a connection whose payloads pass through a window."""

    def send_frame(
        self,
        record: bytes,
        slot: int,
        parts: Sequence[memoryview],
        release_parts: Callable[[], None],
    ) -> None:
        raise WireClosed("decode does not send frames")

    def skip_payload(self, slot: int, size: int) -> None:
        """Do nothing: no part of the payload is in the stream."""


class Listener:
    """Accepts connections on a dedicated thread until closed; owns the listening socket.

    If the process has no descriptor or thread left for a connection, accepting resumes when it has.
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
        """Log once why connections fail, until one succeeds."""
        if reason != self._last_failure:
            self._last_failure = reason
            log.warning("cannot accept a connection on %s: %s", self.address, reason)


class KvTransport(ABC):
    """A way to move KV from prefill to decode."""

    name: ClassVar[str]
    preference: ClassVar[int]  # `auto` tries the lowest first

    def __init__(self, options: TransportOptions) -> None:
        self.options = options

    @classmethod
    def applies(cls, options: TransportOptions) -> bool:
        """Return whether `auto` tries this transport with these options."""
        return True

    def check(self) -> None:  # noqa: B027
        """Check what the transport needs of this process and machine. Raises TransportRefused."""

    def close(self) -> None:  # noqa: B027
        """prefill: release what dialling allocated; no dial may follow."""

    @abstractmethod
    def listen(self, boot: bytes, accept: Callable[[Wire], None]) -> Listener:
        """decode: pass every new wire to `accept`. Raises OSError, or TransportRefused if this
        machine or these options do not support the transport."""

    @abstractmethod
    def dial(self, target: Target, timeout_s: float) -> Wire:
        """prefill: open a wire to that process. Raises TransportRefused."""


def transports() -> dict[str, type[KvTransport]]:
    """Return name -> class, in the order in which `auto` tries them."""
    for module in pkgutil.walk_packages([str(Path(__file__).parent)], f"{__package__}."):
        importlib.import_module(module.name)
    classes = KvTransport.__subclasses__()
    return {cls.name: cls for cls in sorted(classes, key=lambda cls: cls.preference)}


def make_transports(choice: str, options: TransportOptions) -> list[KvTransport]:
    """Return the transports that `choice` (a name, or auto) allows, best first.

    Raises ValueError.
    """
    by_name = transports()
    if choice != "auto" and choice not in by_name:
        raise ValueError(
            f"unknown transport {choice!r}; known transports: auto, {', '.join(by_name)}"
        )
    if choice != "auto":
        return [by_name[choice](options)]
    return [cls(options) for cls in by_name.values() if cls.applies(options)]
