"""uvicorn's HTTP connection class, with limits on the size and time of a request's headers, and
batched writes.

A write wakes the client's process, which takes longer than the write itself. So all writes of one
pass of the event loop are done together at its end: a client process with several connections is
woken once, and the bytes of one response are one TCP segment.

The class also closes the connection of a client that does not read its response, offers the ASGI
extension that drops a response, and still answers a client that has closed only its sending side.
"""

import asyncio
import fcntl
import logging
import re
import socket
import sys
import termios
from collections.abc import Iterable
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pdserve.gateway.http.api import ErrorFormat, HttpError, error_response
from pdserve.gateway.http.responses import DROP, HELD, KEEPS_UP, WRITE, HeldResponses

log = logging.getLogger("pdserve.gateway.http")
MAX_TOGETHER = 16  # connections; with more, the first would wait for the others
MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100
MAX_LAG_BYTES = 1 << 14  # unsent bytes of a client that keeps up; writers wait from 64 KiB on
MAX_IDLE_BYTES = 1 << 20  # more than the loop reads at once
HEAD_TIMEOUT_S = 10.0
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
LOOK_S = 0.1  # between checks whether a client that has ended its sending side is still there
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSED = 7  # TCP_CLOSE of Linux, in the first byte of tcp_info
_BYTES_ACKED = 120  # its offset in tcp_info

UVICORN_VERSIONS = "0.45 to 0.54"  # have the names below, which uvicorn does not document
_PROTOCOL_METHODS = ("_start_asgi_task", "on_response_complete", "send_400_response")
_PROTOCOL_FIELDS = ("cycle", "flow", "headers", "loop", "parser", "pipeline", "scope", "transport")
_CYCLE_FIELDS = (
    "chunked_encoding", "disconnected", "expected_content_length", "keep_alive", "message_event",
    "more_body", "response_complete", "response_started",
)  # fmt: skip


def check_uvicorn(protocol: type, cycle: type) -> None:
    """Check that the installed uvicorn has the private methods and fields that BoundedProtocol
    uses. Raises RuntimeError that names the missing ones, the installed version and the versions to
    install."""
    missing = [name for name in _PROTOCOL_METHODS if not hasattr(protocol, name)]
    for owner, fields in ((protocol, _PROTOCOL_FIELDS), (cycle, _CYCLE_FIELDS)):
        assigned = vars(owner)["__init__"].__code__.co_names
        missing += [name for name in fields if name not in assigned]
    if missing:
        raise RuntimeError(
            f"the HTTP server cannot run on uvicorn {version('uvicorn')}, which lacks "
            f"{', '.join(missing)}: install a version from {UVICORN_VERSIONS}"
        )


check_uvicorn(HttpToolsProtocol, RequestResponseCycle)


class BatchedWrites:
    """Collects the bytes to be written to all connections of an event loop, and writes them
    together."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Transport, list[bytes]] = {}

    def write(self, transport: asyncio.Transport, pieces: Iterable[bytes]) -> None:
        """Queue bytes for a connection. They are written at the end of the event loop's pass, at
        `flush`, or as soon as MAX_TOGETHER connections have queued bytes."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush_all)
        self._waiting.setdefault(transport, []).extend(pieces)
        if len(self._waiting) == MAX_TOGETHER:
            self._flush_all()

    def flush(self, transport: asyncio.Transport) -> None:
        """Write the queued bytes of a connection now; discard them if the connection is closing."""
        pieces = self._waiting.pop(transport, None)
        if pieces and not transport.is_closing():
            transport.write(b"".join(pieces))

    def num_waiting(self, transport: asyncio.Transport) -> int:
        """Return the number of queued bytes of a connection."""
        pieces = self._waiting.get(transport)
        return sum(map(len, pieces)) if pieces else 0

    def _flush_all(self) -> None:
        while self._waiting:
            transport = next(iter(self._waiting))
            try:
                self.flush(transport)
            except Exception:  # only this connection fails
                log.exception("closing an HTTP connection: cannot write to it")
                transport.abort()


class BoundedProtocol(HttpToolsProtocol):
    """HTTP connection that answers 431 to request headers over MAX_HEAD_BYTES, and closes if they
    take longer than HEAD_TIMEOUT_S.

    If a request is answered before its body has arrived, the connection closes after that answer;
    the rest of the body may take HEAD_TIMEOUT_S. `errors` formats the errors of requests whose path
    is not known yet; `lost` is set when the connection ends.

    The connection is closed, and unread data is discarded, if the client reads nothing for
    `stall_s` while the transport's buffer is full, or while the end of a complete answer is unread.

    An offer to change the protocol (`Upgrade: h2c`, which Java's client sends) is hidden from the
    parser, which would otherwise read the body in the other protocol. If such an offer arrives in
    several pieces, the connection ends after its answer, and later input is ignored.

    A TCP FIN means either that the client has closed only its sending side, or that it has
    disconnected. To tell, the server writes an interim response, since the system of a client that
    has disconnected replies with a reset, and checks for the reset until the answer is sent. With
    HTTP/1.0 and TLS, where this is not possible, a FIN counts as a disconnect.
    """

    _head_bytes = 0
    _idle_bytes = 0  # received since the last piece of a body: chunk extensions, trailers
    _in_head = True
    _answered_early = False  # the request is answered, or is being answered, before its body's end
    _ignores_input = False  # the parser cannot read what comes; the current answer is the last
    _half_closed = False  # the client sends no more, and may wait for its answer
    _timer: asyncio.TimerHandle | None = None
    _reset_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _progress = 0  # the reading of `_bytes_taken` when `_stall_timer` began
    _running: RequestResponseCycle | None = None  # others may wait behind it

    def __init__(
        self,
        *args: Any,
        errors: ErrorFormat,
        stall_s: float,
        held: HeldResponses,
        writes: BatchedWrites,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._errors = errors
        self._stall_s = stall_s
        self._held = held
        self._writes = writes
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall()
        if self._reset_timer is not None:
            self._reset_timer.cancel()
        self.lost.set()
        running = self._running
        if running is not None and not running.response_complete:  # uvicorn notifies only the last
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's input. Returns True to keep the connection open for the
        answer."""
        if self._half_closed:
            return True
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        is_http10 = cycle.scope["http_version"] == "1.0"
        if is_http10 or self.transport.get_extra_info("ssl_object") is not None:
            return False
        self._half_closed = True
        if not cycle.response_started and not self.pipeline:
            self.transport.write(INTERIM)
        self._check_reset()
        return True

    def _check_reset(self) -> None:
        self._reset_timer = None
        if self.transport.is_closing():
            return
        if _is_reset(self.transport.get_extra_info("socket")):
            self.transport.abort()
        else:
            self._reset_timer = self.loop.call_later(LOOK_S, self._check_reset)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if self._timer is None:  # a further request on a kept connection
                self._start_timer()
            self._head_bytes += len(data)
            # A body may follow in the same packet; without one, only the head fills it.
            if self._head_bytes > MAX_HEAD_BYTES and b"\r\n\r\n" not in data[:MAX_HEAD_BYTES]:
                self._refuse(431, "the request headers are too large")
                return
        if self._in_head and _UPGRADE.search(data):
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest
        if self._ignores_input:
            return
        if self.transport is not None and not self.transport.is_closing():
            self._idle_bytes += len(data)
            super().data_received(data)
            if self.cycle is not None and self.parser.should_upgrade():
                self._ignores_input, self.cycle.keep_alive = True, False
            if self._idle_bytes > MAX_IDLE_BYTES:  # the parser would collect them without a bound
                self.transport.abort()

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        if not self.flow.write_paused and self._acknowledged_bytes() is None:
            self._stop_stall()  # new bytes cannot be distinguished from unread ones

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse(431, "the request has too many headers")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._idle_bytes = 0
        self._stop_timer()
        if self.transport.is_closing():
            return
        extensions: dict[str, Any] = {
            DROP: self.transport.abort,
            KEEPS_UP: self._keeps_up,
            HELD: self._held,
        }
        self.scope["extensions"] = extensions
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        if self._answered_early and self.cycle.response_complete:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        """Run the application for a request. uvicorn calls this for each request after the requests
        before it are answered."""
        self._running = cycle

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_last(message: Message) -> None:
                self._writes.flush(self.transport)
                early = message["type"] == "http.response.start" and cycle.more_body
                if early:
                    MutableHeaders(scope=message)["connection"] = "close"
                await send(message)
                if early:  # closed below: uvicorn would close before the client reads the answer
                    self._answered_early, cycle.keep_alive = True, True

            scope["extensions"][WRITE] = partial(self._write_piece, cycle)
            is_http10 = scope["http_version"] == "1.0"
            await app(scope, receive, _unframed(cycle, send_last) if is_http10 else send_last)

        super()._start_asgi_task(cycle, answer)  # type: ignore[arg-type]

    def _keeps_up(self) -> bool:
        unsent = self.transport.get_write_buffer_size() + self._writes.num_waiting(self.transport)
        return unsent < MAX_LAG_BYTES

    def _write_piece(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        """Write a piece of a chunked response body at once. Returns False and writes nothing if the
        response has not begun or is over, or if the client lags."""
        if not cycle.response_started or cycle.response_complete or not cycle.chunked_encoding:
            return False
        if cycle.disconnected or self.transport.is_closing() or not self._keeps_up():
            return False
        self._writes.write(self.transport, (b"%x\r\n" % len(data), data, b"\r\n"))
        return True

    def on_response_complete(self) -> None:
        if self._answered_early:
            self.pipeline.clear()  # requests after the last are not answered
        super().on_response_complete()
        self._watch_last_bytes()
        if self._answered_early and self.cycle.more_body:
            self._start_timer()  # for the rest of the body
        elif self._answered_early or (self._half_closed and self.cycle.response_complete):
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall()
        self._watch_last_bytes()

    def _watch_last_bytes(self) -> None:
        """Start the stall timer for the end of a complete answer that the client has not read
        yet."""
        if self.cycle is not None and self.cycle.response_complete:
            self._start_stall()

    def _start_stall(self) -> None:
        self._stop_stall()
        if self._has_unread():
            self._progress = self._bytes_taken()
            self._stall_timer = self.loop.call_later(self._stall_s, self._check_progress)

    def _has_unread(self) -> bool:
        """Return whether the client has not received all written bytes. On TLS connections the
        transport does not know this; the operating system counts the unacknowledged bytes."""
        if self.transport.get_write_buffer_size():
            return True
        if self.transport.get_extra_info("ssl_object") is None:
            return False
        return _unsent(self.transport.get_extra_info("socket")) > 0

    def _bytes_taken(self) -> int:
        """Return a number that grows whenever the client receives bytes, to detect progress."""
        acked = self._acknowledged_bytes()
        return -self.transport.get_write_buffer_size() if acked is None else acked

    def _acknowledged_bytes(self) -> int | None:
        """Return the number of bytes that the client's system has acknowledged; None if this is not
        a TCP connection."""
        sock = self.transport.get_extra_info("socket")
        return None if sock is None or sock.family == socket.AF_UNIX else _acknowledged(sock)

    def _stop_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_progress(self) -> None:
        self._stall_timer = None
        if not self._has_unread() or self._bytes_taken() > self._progress:
            self._start_stall()
        else:
            log.warning(
                "closing a connection: the client read nothing of its response for %g s",
                self._stall_s,
            )
            self.transport.abort()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_slow(self) -> None:
        self._timer = None
        self.transport.close()
        self._start_stall()  # the connection closes when all is taken

    def send_400_response(self, msg: str) -> None:
        """Answer 400 to input that is not HTTP, and close the connection. uvicorn's parser calls
        this."""
        self._refuse(400, "this is not an HTTP/1.1 request")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        error = HttpError(status, message, headers={"connection": "close"})
        response = error_response(self._errors, error)
        head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
        head += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", bytes(response.body)]))
        self.transport.close()
        self._start_stall()


def _acknowledged(sock: socket.socket) -> int:
    """Return the number of bytes that the peer has acknowledged on a TCP socket: tcpi_bytes_acked
    of Linux's struct tcp_info."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    return int.from_bytes(info[_BYTES_ACKED:], sys.byteorder)


def _unsent(sock: socket.socket) -> int:
    """Return the number of written bytes that the peer's system has not acknowledged yet; 0 for a
    closed socket."""
    try:
        size = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(size, sys.byteorder)


def _is_reset(sock: socket.socket) -> bool:
    """Return whether the peer has reset the TCP connection. Always False for a Unix socket, on
    which the next write fails instead."""
    if sock.family == socket.AF_UNIX:
        return False
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED


def _unframed(cycle: RequestResponseCycle, send: Send) -> Send:
    """Wrap `send` for an answer to an HTTP/1.0 client. If the answer's length is unknown, its body
    is sent without chunked framing, which such clients do not understand, and ends when the
    connection closes."""
    unknown_length = False

    async def send_unframed(message: Message) -> None:
        nonlocal unknown_length
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            unknown_length = "content-length" not in headers
            if unknown_length:
                headers["connection"] = "close"
                cycle.chunked_encoding, cycle.keep_alive = False, False
        elif unknown_length:  # uvicorn counts this down to the end
            cycle.expected_content_length = len(message.get("body", b"")) + bool(
                message.get("more_body")
            )
        await send(message)

    return send_unframed
