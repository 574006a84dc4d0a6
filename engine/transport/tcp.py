"""Passes KV over a TCP connection: each payload follows its frame's record in the stream."""

import contextlib
import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from pdserve.engine.transport.base import (
    KvTransport,
    Listener,
    Payload,
    Target,
    TransportOptions,
    TransportRefused,
    Wire,
)

SOCKET_BUFFER_BYTES = 4 << 20
BACKLOG = 128  # connections that wait to be accepted; the kernel makes further ones retry after 1 s
AT_ONCE_S = 0.005  # time limit for writing straight from the pool
_SCRATCH_BYTES = 64 << 10


class TcpWire(Wire):
    """A TCP connection whose payloads are written from the pool straight into the socket. Its slots
    are no memory; their number only limits the frames in flight.

    Bytes that the socket does not accept within AT_ONCE_S are copied to a staging buffer, so that a
    thread that frees blocks never waits for a peer.
    """

    def __init__(self, sock: socket.socket, slot_bytes: int) -> None:
        super().__init__(sock, slot_bytes)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        self._staging: memoryview | None = None
        self._payload_buffer: memoryview | None = None  # the payload that was read last

    def setup(self) -> None:
        """Do nothing: nothing precedes Hello in the stream."""

    def proof(self) -> bytes:
        return bytes(16)  # a stream that carried the Hello carries the rest

    def send_frame(
        self,
        record: bytes,
        slot: int,
        parts: Sequence[memoryview],
        release_parts: Callable[[], None],
    ) -> None:
        views = deque([memoryview(record), *parts])
        self._write_at_once(views)
        staged = self._stage(views, len(record) + self.slot_bytes) if views else b""
        release_parts()
        self.write(staged)

    def _write_at_once(self, views: deque[memoryview]) -> None:
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        deadline = time.monotonic() + AT_ONCE_S
        while views and (wait_s := deadline - time.monotonic()) > 0 and poll.poll(wait_s * 1000):
            with contextlib.suppress(BlockingIOError):
                self.write_some(views, socket.MSG_DONTWAIT)

    def _stage(self, views: deque[memoryview], capacity: int) -> memoryview:
        if self._staging is None:
            self._staging = memoryview(mmap.mmap(-1, capacity))
        size = 0
        for view in views:
            self._staging[size : size + len(view)] = view
            size += len(view)
        return self._staging[:size]

    def payload(self, slot: int, size: int) -> Payload:
        if self._payload_buffer is None:
            self._payload_buffer = memoryview(mmap.mmap(-1, self.slot_bytes))
        self.fill(self._payload_buffer[:size])
        return self._payload_buffer[:size]

    def skip_payload(self, slot: int, size: int) -> None:
        scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
        while size:
            part = scratch[: min(size, len(scratch))]
            self.fill(part)
            size -= len(part)


class TcpTransport(KvTransport):
    """The tcp transport, which connects any two hosts."""

    name = "tcp"
    preference = 100

    def listen(self, incarnation: bytes, accept: Callable[[Wire], None]) -> Listener:
        host, port = split_address(self.options.data_bind)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(BACKLOG)
        except OSError as err:
            sock.close()
            raise OSError(err.errno, f"{os.strerror(err.errno or 0)}: {host}:{port}") from None
        name = f"[{host}]" if ":" in host else host
        address = f"{name}:{sock.getsockname()[1]}"
        return Listener(sock, address, lambda peer: accept(_wire(peer, self.options)))

    def dial(self, target: Target, timeout_s: float) -> Wire:
        if not target.address:
            raise TransportRefused("decode has no tcp listener")
        try:
            sock = socket.create_connection(split_address(target.address), timeout_s)
        except (OSError, ValueError) as err:
            raise TransportRefused(f"{target.address}: {err}") from None
        try:
            sock.settimeout(None)
            return _wire(sock, self.options)
        except OSError as err:  # decode has closed it
            sock.close()
            raise TransportRefused(f"{target.address}: {err}") from None


def _wire(sock: socket.socket, options: TransportOptions) -> TcpWire:
    return TcpWire(sock, options.slot_bytes)


def split_address(address: str) -> tuple[str, int]:
    """Split an address host:port or [v6]:port into host and port. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"the address must be host:port, not {address!r}")
    return host.strip("[]"), int(port)
