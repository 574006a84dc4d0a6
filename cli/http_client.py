"""A small client of pdserve's HTTP API that needs only the standard library, for commands such as
`chat` and `models`. It opens one connection per request and limits the size of responses.
"""

import http.client
import json
import signal
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pdserve.cli.options import ClientSettings, CommandError

MAX_ANSWER_BYTES = 16 << 20
MAX_LINE_BYTES = 1 << 20
BROKEN = "broken"  # the code of a response that did not end


class ApiError(CommandError):
    """Raised if a server cannot be reached or responds with an error. `status` is the HTTP status,
    0 without a response; `code` is the name of the error in the API."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        if status == 0 and code != BROKEN:
            self.advice = "\nStart a server with `pdserve up` in another terminal, or set --url."
        elif status == 401:
            self.advice = "\nPass the server's key with --api-key (or PDSERVE_API_KEY)."
        elif code == "context_length_exceeded":
            self.advice = "\nType /reset to clear the conversation, then /retry to ask again."


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens: a host and a port, or a Unix socket. `prefix` comes before the path
    of every request."""

    host: str
    port: int
    is_secure: bool
    prefix: str
    unix_path: str


def address_of(url: str) -> ServerAddress:
    """Parse a server's URL. Raises ApiError unless it is http(s)://host[:port] or unix:PATH."""
    kind, _, path = url.partition(":")
    unix_path = path.removeprefix("//") if kind == "unix" else ""
    text = "http://localhost" if unix_path else url
    try:
        parts = urlsplit(text if "//" in text else "http://" + text)
        host, port = parts.hostname or "", parts.port  # ValueError: the port is not a number
        host.encode("idna")  # UnicodeError: not a host name
    except ValueError:
        host = ""
    if not host or parts.scheme not in ("http", "https"):
        raise ApiError(f"{url!r} is not the URL of a server; check --url", 400)
    is_secure = parts.scheme == "https"
    default = 443 if is_secure else 80
    return ServerAddress(host, port or default, is_secure, parts.path.rstrip("/"), unix_path)


def bearer(key: str) -> str:
    """Return the value of the Authorization header for an API key. Raises ApiError if the key has
    characters that a header cannot contain."""
    if not (key.isascii() and key.isprintable()):
        raise ApiError(
            "the API key has characters that an HTTP header cannot contain; check --api-key", 400
        )
    return f"Bearer {key}"


class _UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@contextmanager
def _shut_down_by_ctrl_c(sock: socket.socket) -> Iterator[None]:
    """Within the block, shut the socket down on Ctrl-C, and raise KeyboardInterrupt at its end.

    Python itself raises KeyboardInterrupt too late if the signal arrives just before the main
    thread waits for data, and ignores the exception in a destructor. Another thread therefore
    reads the signal from a socket, to which Python writes it at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = threading.Event()
    signals, writer = socket.socketpair()

    def watch() -> None:
        while number := signals.recv(1):
            if number[0] == signal.SIGINT:
                interrupted.set()
                with suppress(OSError):  # the server has closed the connection
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

    watcher = threading.Thread(target=watch, daemon=True)
    previous = -1
    try:
        writer.setblocking(False)
        watcher.start()
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        yield
    except ApiError:
        if not interrupted.is_set():
            raise
    finally:
        with suppress(ValueError):  # the garbage collector ends the block in another thread
            signal.set_wakeup_fd(previous)
        writer.close()
        if watcher.is_alive():
            watcher.join()
        signals.close()
    if interrupted.is_set():
        raise KeyboardInterrupt


class ApiClient:
    """A blocking client of one server; `timeout_s` limits each wait for the network."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        """Prepare a client of the server at `url`; connect at each request. Raises ApiError unless
        the URL is http(s)://host[:port] or unix:PATH."""
        self.url = url.rstrip("/")
        self._address = address_of(url)
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = bearer(api_key)

    def get(self, path: str) -> bytes:
        """Send a GET request; return the response's body. Raises ApiError if the status is not
        2xx."""
        with self._open("GET", path, None) as response:
            return self._body(response)

    def get_json(self, path: str) -> Any:
        """Send a GET request; return the response's body, parsed as JSON. Raises ApiError if the
        status is not 2xx or the body is not JSON."""
        return self._json(self.get(path))

    def models(self) -> list[dict[str, Any]]:
        """Return the server's list of models: the entries of /v1/models. Raises ApiError if the
        request fails."""
        return entries_of(self.get_json("/v1/models"), self.url)

    def post_json(self, path: str, body: dict[str, Any]) -> Any:
        """Send a POST request with a JSON body; return the response's body, parsed as JSON. Raises
        ApiError if the status is not 2xx or the body is not JSON."""
        with self._open("POST", path, body) as response:
            return self._json(self._body(response))

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Send a POST request for a streamed response; yield the data of each server-sent event
        until [DONE]. Raises ApiError if the request fails or the stream ends early.

        Closing the iterator closes the connection, which cancels the request. After the connection
        is made, Ctrl-C raises KeyboardInterrupt, whatever the main thread does when it arrives.
        """
        with self._open("POST", path, {**body, "stream": True}, streams=True) as response:
            try:
                while line := response.readline(MAX_LINE_BYTES):
                    if not line.startswith(b"data:"):
                        continue
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    event = self._json(data)
                    if not isinstance(event, dict):
                        raise unexpected_response(self.url)
                    if error := event.get("error"):
                        raise _error(error, response.status)
                    yield event
            except (OSError, http.client.HTTPException) as error:
                raise self._broken(error) from None
            raise ApiError("the response ended early", code=BROKEN)

    @contextmanager
    def _open(
        self, method: str, path: str, body: dict[str, Any] | None, *, streams: bool = False
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield its 2xx response; close the connection at the end of the block.
        `streams`: the response may take long, so Ctrl-C shuts the connection down. Raises ApiError
        if there is no response or its status is not 2xx."""
        connection = self._connection()
        try:
            data = None if body is None else json.dumps(body).encode()
            try:
                connection.connect()
            except OSError as error:
                raise self._silent(error) from None
            with _shut_down_by_ctrl_c(connection.sock) if streams else nullcontext():
                try:
                    connection.request(method, self._address.prefix + path, data, self._headers)
                    response = connection.getresponse()
                except (OSError, http.client.HTTPException) as error:
                    raise self._silent(error) from None
                if response.status >= 300:
                    status_text = f"{response.status} {response.reason}"
                    raise error_of(self._body(response), response.status, status_text)
                yield response
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        address = self._address
        if address.unix_path:
            return _UnixConnection(address.unix_path, self._timeout_s)
        kind = http.client.HTTPSConnection if address.is_secure else http.client.HTTPConnection
        return kind(address.host, address.port, timeout=self._timeout_s)

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        try:
            body = response.read(MAX_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from None
        if len(body) > MAX_ANSWER_BYTES:
            raise ApiError(f"the response is larger than {MAX_ANSWER_BYTES >> 20} MiB")
        return body

    def _silent(self, error: Exception) -> ApiError:
        return ApiError(f"no server responds at {self.url} ({error})")

    def _broken(self, error: Exception) -> ApiError:
        return ApiError(f"the connection to {self.url} failed: {error}", code=BROKEN)

    def _json(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError:
            raise ApiError(
                f"{self.url} did not return JSON; check that it is a pdserve server"
            ) from None


def client_of(settings: ClientSettings, timeout_s: float = 600.0) -> ApiClient:
    """Make a client of the server that the options name. Raises ApiError if the URL is
    malformed."""
    key = settings.api_key[0] if settings.api_key else ""
    return ApiClient(settings.url, key, timeout_s)


def error_of(body: bytes, status: int, default_message: str) -> ApiError:
    """Make an ApiError from a response whose status is not 2xx: from the OpenAI error object in its
    body, or with `default_message` if it contains none."""
    try:
        return _error(json.loads(body)["error"], status)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ApiError(default_message, status)


def entries_of(models: Any, url: str) -> list[dict[str, Any]]:
    """Return the list of models in a response to /v1/models, which is parsed JSON. Raises ApiError
    if it contains no such list."""
    entries = models.get("data") if isinstance(models, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("id"), str) for entry in entries
    ):
        raise unexpected_response(url)
    return entries


def unexpected_response(url: str) -> ApiError:
    """Make the ApiError for a response that does not have the form that OpenAI's API defines."""
    return ApiError(
        f"{url} does not respond like OpenAI's API; check that it is a pdserve server", 502
    )


def _error(error: Any, status: int) -> ApiError:
    if isinstance(error, str):
        return ApiError(error, status)
    return ApiError(str(error.get("message", "")), status, str(error.get("code") or ""))
