"""uvicorn's HTTP protocol with the bounds that it lacks: size and time of a request's head.

Also the ASGI extension by which a response that its client does not read is dropped.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdserve.gateway.http.replies import DROP

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100
HEAD_TIMEOUT_S = 10.0
_TOO_LARGE = (
    b'{"error":{"message":"the request\'s head is too large","type":"invalid_request_error",'
    b'"param":null,"code":null}}'
)


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a head over MAX_HEAD_BYTES with 431, and drops one that takes too long."""

    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if self._timer is None:  # a further request on a kept connection
                self._expect_head()
            self._head_bytes += len(data)
            # A body may follow in the same packet; without one the head alone fills it.
            if self._head_bytes > MAX_HEAD_BYTES and b"\r\n\r\n" not in data[:MAX_HEAD_BYTES]:
                self._refuse()
                return
        if self.transport is not None and not self.transport.is_closing():
            super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._stop_timer()
        if self.transport.is_closing():
            return
        extensions: dict[str, Any] = {DROP: self.transport.abort}
        self.scope["extensions"] = extensions
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def _expect_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        self.transport.close()

    def _refuse(self) -> None:
        if self.transport.is_closing():
            return
        length = str(len(_TOO_LARGE)).encode()
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
            b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: " + length + b"\r\n\r\n" + _TOO_LARGE
        )
        self.transport.close()
