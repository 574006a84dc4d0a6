"""The interface between the shared HTTP layer (the "shell") and each API on it: routes, error
formats, limits, and JSON text built in small pieces, so that a long response neither blocks the
event loop nor exists in memory twice.

An HttpApi is one HTTP API, e.g. OpenAI's. It owns its routes, its request and response objects, the
framing of its streams and the JSON format of its errors. The shell owns status codes and headers.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import JSONResponse

from pdserve.protos.common_pb2 import INTERNAL, ErrorCode
from pdserve.services.common.errors import HTTP_STATUS, ServiceError

AT_ONCE = 8  # items of a list written before other tasks run
PIECE_BYTES = 1 << 16  # of a long text, sent at once

T = TypeVar("T")


class JsonPieces(list[bytes | bytearray]):
    """The JSON text of one value, as a list of byte strings to be sent in order."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self))

    def text(self) -> bytes:
        return b"".join(self)

    def parts(self) -> Iterator[bytes]:
        """Yield the whole text in byte strings of PIECE_BYTES each; the last may be shorter."""
        buffer = bytearray()
        for piece in self:
            for offset in range(0, len(piece), PIECE_BYTES):
                buffer += piece[offset : offset + PIECE_BYTES]
                if len(buffer) >= PIECE_BYTES:
                    yield bytes(buffer[:PIECE_BYTES])
                    del buffer[:PIECE_BYTES]
        if buffer:
            yield bytes(buffer)


class JsonList:
    """The JSON text of a list to which items are added over time."""

    def __init__(self) -> None:
        self._items = bytearray()

    def extend(self, items: Sequence[Any]) -> None:
        """Append items to the list's JSON text. Blocks the event loop: pass at most AT_ONCE
        items."""
        if items:
            if self._items:
                self._items += b","
            self._items += to_json(items)[1:-1]

    def pieces(self) -> JsonPieces:
        """Return the JSON text of the list. The pieces are not copied: items added later appear in
        them."""
        return JsonPieces((b"[", self._items, b"]"))


async def list_json(items: Sequence[T], as_object: Callable[[T], Any]) -> JsonPieces:
    """Return the JSON text of the list of `as_object(item)` for each item. Lets other tasks run
    after every AT_ONCE items."""
    text = JsonList()
    for start in range(0, len(items), AT_ONCE):
        text.extend([as_object(item) for item in items[start : start + AT_ONCE]])
        await asyncio.sleep(0)
    return text.pieces()


def object_json(fields: Mapping[str, Any]) -> JsonPieces:
    """Return the JSON text of an object. Field values of type JsonPieces are inserted unchanged,
    since they are JSON text already; other values are serialized."""
    pieces = JsonPieces((b"{",))
    for name, value in fields.items():
        pieces.append((b"," if len(pieces) > 1 else b"") + to_json(name) + b":")
        pieces += value if isinstance(value, JsonPieces) else (to_json(value),)
    pieces.append(b"}")
    return pieces


def array_json(texts: Iterable[JsonPieces]) -> JsonPieces:
    """Return the JSON text of a list, joined from the JSON text of each item."""
    pieces = JsonPieces((b"[",))
    for text in texts:
        if len(pieces) > 1:
            pieces.append(b",")
        pieces += text
    pieces.append(b"]")
    return pieces


RETRY_STATUS = (429, 503)
REQUEST_ID = "x-request-id"  # a header of every response

Event = bytes | JsonPieces
"""A framed server-sent event. A long one is in pieces that no longer grow, and is sent in parts."""


def json_event(head: bytes, text: JsonPieces) -> Event:
    """Return a server-sent event: `head` (e.g. `data: `), then the JSON text of the event's
    data."""
    return sent_event(JsonPieces((head, *text, b"\n\n")))


def sent_event(pieces: JsonPieces) -> Event:
    """Return a complete event as one byte string, or as JsonPieces if it is longer than
    PIECE_BYTES."""
    return pieces if pieces.num_bytes > PIECE_BYTES else pieces.text()


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits for HTTP clients: the size of one request body and of all bodies together, the time to
    send a body, and how much of a stream, and for how long, a client may leave unread."""

    max_body_bytes: int
    max_bodies_bytes: int
    body_timeout_s: float
    max_buffer_bytes: int
    stall_s: float


class CodedError(ServiceError):
    """A ServiceError with an additional error code, `api_code`, that only one API defines, such as
    OpenAI's `previous_response_not_found`."""

    def __init__(self, code: ErrorCode, message: str, param: str, api_code: str) -> None:
        super().__init__(code, message, param)
        self.api_code = api_code


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error response before an API converts it to its own JSON format.

    `code` identifies the error for programs: an ErrorCode's name in lower case, a code of the HTTP
    layer ("unknown_url", "method_not_allowed"), a CodedError's `api_code`, or empty.
    """

    status: int
    message: str
    code: str = ""
    param: str = ""  # the wrong field of the request, if any
    headers: dict[str, str] = field(default_factory=dict)
    request_id: str = ""  # as in the response's header

    @classmethod
    def of(cls, error: Exception) -> "HttpError":
        """Convert an exception to the error that the client receives.

        A ServiceError keeps its code, message and field; statuses 429 and 503 get a Retry-After
        header, and 401 the WWW-Authenticate header. Any other exception becomes an internal error
        without details, which the calling code logs.
        """
        if not isinstance(error, ServiceError):
            error = ServiceError(
                INTERNAL, "internal server error; the server's log has the details"
            )
        status = HTTP_STATUS[error.code]
        headers = {}
        if status in RETRY_STATUS:
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        api_code = error.api_code if isinstance(error, CodedError) else ""
        code = api_code or ErrorCode.Name(error.code).lower()
        return cls(status, error.message, code, error.param, headers)


class ErrorFormat(Protocol):
    """The JSON format in which one API returns errors."""

    statuses: Mapping[int, int] = MappingProxyType({})
    """HTTP statuses that the API returns in place of others."""

    def error_object(self, error: HttpError) -> dict[str, Any]:
        """Return the JSON body of an error response."""
        ...

    def error_event(self, error: HttpError) -> Event:
        """Return the bytes of a stream's last event, which reports the error that ended the
        stream."""
        ...


class HttpApi(ErrorFormat, Protocol):
    """One HTTP API, such as OpenAI's: its routes, path prefixes and error format. The generators of
    its streams yield complete events as bytes (http/responses.py)."""

    paths: tuple[str, ...]
    """Prefixes of the paths on which errors have this API's format."""

    not_offered: tuple[str, ...] = ()
    """Prefixes of routes that other servers of the API have and this one does not: a path with a
    slash at its end, or a method and a path if this server has the path with another method."""

    request_id_header: str = REQUEST_ID
    """The header with a request's id for its clients; every response has REQUEST_ID too."""

    error_model: type[BaseModel]
    """The type of `error_object`, for the description of the API."""

    def add_routes(self, app: FastAPI) -> None:
        """Add the API's routes to the application, each with its OpenAPI description
        (http/docs.py)."""
        ...


def api_of(apis: Sequence[HttpApi], path: str) -> HttpApi:
    """Return the first API with a path prefix that matches the URL path; the last API if none
    matches."""
    return next((api for api in apis if path.startswith(api.paths)), apis[-1])


def error_response(shape: ErrorFormat, error: HttpError) -> JSONResponse:
    """Return an HTTP response with the error in the API's JSON format, and with the API's own
    status code if it has one for this error."""
    status = shape.statuses.get(error.status, error.status)
    return JSONResponse(shape.error_object(error), status, error.headers)
