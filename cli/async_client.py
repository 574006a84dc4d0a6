"""An asyncio HTTP/1.1 client for many concurrent requests to one server. It keeps connections open
and parses responses with httptools.

A request costs little CPU time, so that a benchmark on the server's own machine takes few of its
cores.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import httptools

from pdserve.cli.http_client import (
    BROKEN,
    MAX_ANSWER_BYTES,
    ApiError,
    address_of,
    bearer,
    entries_of,
    error_of,
)
from pdserve.cli.options import ClientSettings

OnBody = Callable[[bytes, float], None]
"""Takes a piece of a body and when it came (perf_counter)."""


class Response(NamedTuple):
    """An HTTP response of any status. `body` is empty if a callback (OnBody) has received the
    body."""

    status: int
    body: bytes
    retry_after_s: float

    @property
    def json(self) -> Any:
        """The body, parsed as JSON. Raises ApiError if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise ApiError(
                "the response is not JSON; check that --url names an OpenAI-compatible server", 502
            ) from None

    def check(self) -> "Response":
        """Return this response if its status is 2xx; otherwise raise ApiError with the server's
        error text."""
        if self.status >= 300:
            raise error_of(self.body, self.status, f"status {self.status}")
        return self


class _Connection(asyncio.Protocol):
    """One connection to the server, with at most one request at a time."""

    def __init__(self) -> None:
        self.usable = True  # whether it can take another request
        self.has_response_data = False  # whether part of the current response has arrived
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Response] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    async def send(self, request: bytes, on_body: OnBody | None) -> Response:
        """Send a request; return its response. With `on_body`, pass it the pieces of a 2xx
        response's body instead. Raises ApiError if the connection breaks before the response is
        complete."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._retry_after_s = 0.0
        self._ends_with_connection = False
        self.has_response_data = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        finally:
            if not self._done.done() or self._done.cancelled():
                self.close()  # the rest is not needed, and closing stops the server
            self._done = None

    def data_received(self, data: bytes) -> None:
        self.has_response_data = True
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server does not respond with HTTP: {error}")

    def on_message_begin(self) -> None:
        self._ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        lower_name = name.lower()
        if lower_name == b"retry-after" and value.isdigit():
            self._retry_after_s = float(value)
        elif lower_name in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_body(self, piece: bytes) -> None:
        if self._on_body and self._parser.get_status_code() < 300:
            self._on_body(piece, self._now)
            return
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_ANSWER_BYTES:
            self._fail(f"the response is larger than {MAX_ANSWER_BYTES >> 20} MiB")
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        self.usable = self.usable and self._parser.should_keep_alive()
        if self._done and not self._done.done():
            status = self._parser.get_status_code()
            self._done.set_result(Response(status, b"".join(self._pieces), self._retry_after_s))
        if not self.usable:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._done and error is None and self.has_response_data and self._ends_with_connection:
            self.on_message_complete()
        self._fail(f"the connection failed: {error}" if error else "the response ended early")

    def _fail(self, message: str) -> None:
        if self._done and not self._done.done():
            self._done.set_exception(ApiError(message, code=BROKEN))
        self.close()

    def close(self) -> None:
        self.usable = False
        if self._transport:
            self._transport.close()


class AsyncApi:
    """A client of one server, with a pool of idle connections that are reused."""

    def __init__(self, settings: ClientSettings, timeout_s: float = 600.0) -> None:
        """Prepare a client of the server in the options; connect later. Raises ApiError unless the
        URL is http(s)://host[:port] or unix:PATH."""
        self.url = settings.url.rstrip("/")
        self._address = address = address_of(settings.url)
        self._tls = ssl.create_default_context() if address.is_secure else None
        self._timeout_s = timeout_s
        key = settings.api_key[0] if settings.api_key else ""
        auth = f"Authorization: {bearer(key)}\r\n" if key else ""
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._head = f"Host: {host}:{address.port}\r\nContent-Type: application/json\r\n{auth}"
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Response:
        """Send a GET request; return its response, whatever the status. Raises ApiError if no
        response arrives."""
        return await self._send("GET", path, b"", None)

    async def first_model(self) -> str:
        """Return the name of the first model that the server lists. Raises ApiError if it lists
        none."""
        models = entries_of((await self.get("/v1/models")).check().json, self.url)
        if not models:
            raise ApiError(f"{self.url} serves no model yet", 503)
        return str(models[0]["id"])

    async def post(
        self, path: str, body: dict[str, Any] | bytes, on_body: OnBody | None = None
    ) -> Response:
        """Send a POST request; return its response, whatever the status. With `on_body`, pass it
        the pieces of a 2xx response's body. Raises ApiError if no response arrives."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._send("POST", path, data, on_body)

    async def _send(self, method: str, path: str, data: bytes, on_body: OnBody | None) -> Response:
        head = f"{method} {self._address.prefix}{path} HTTP/1.1\r\n{self._head}"
        request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    reused = bool(self._idle)
                    connection = self._idle.pop() if reused else await self._connect()
                    try:
                        response = await connection.send(request, on_body)
                        break
                    except ApiError:
                        # The server had closed an idle connection and has not seen the request.
                        if not reused or connection.has_response_data:
                            raise
        except TimeoutError:
            raise ApiError(
                f"{self.url} sent no complete response within {self._timeout_s:g} s", 408, BROKEN
            ) from None
        if connection.usable:
            self._idle.append(connection)
        return response

    async def _connect(self) -> _Connection:
        loop, address = asyncio.get_running_loop(), self._address
        try:
            if address.unix_path:
                _, connection = await loop.create_unix_connection(_Connection, address.unix_path)
            else:
                _, connection = await loop.create_connection(
                    _Connection, address.host, address.port, ssl=self._tls
                )
        except OSError as error:
            raise ApiError(f"no server responds at {self.url} ({error})") from None
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
