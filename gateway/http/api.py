"""The contract between the HTTP shell and the APIs that it carries: dialects, errors, bounds.

A dialect is one HTTP API, e.g. OpenAI's. It owns its routes, its request and answer objects, the
framing of its streams and the shape of its errors. The shell owns status codes and headers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import JSONResponse

from pdserve.gateway.http.json_text import PIECE_BYTES, JsonPieces
from pdserve.protos.common_pb2 import INTERNAL, ErrorCode
from pdserve.services.common.errors import HTTP_STATUS, ServiceError

RETRY_STATUS = (429, 503)
REQUEST_ID = "x-request-id"  # a header of every answer

Event = bytes | JsonPieces
"""A server-sent event. One in pieces is long, and they grow no more: it is sent part by part."""


def json_event(head: bytes, text: JsonPieces) -> Event:
    """Return the event whose data are a JSON text."""
    return sent_event(JsonPieces((head, *text, b"\n\n")))


def sent_event(pieces: JsonPieces) -> Event:
    """Return an event that is framed already."""
    return pieces if pieces.num_bytes > PIECE_BYTES else pieces.text()


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds on what a client may send, and on how slowly it may send and read."""

    max_body_bytes: int
    max_bodies_bytes: int
    body_timeout_s: float
    max_buffer_bytes: int
    stall_s: float


class CodedError(ServiceError):
    """An error for which one API has a specific code, `api_code`."""

    def __init__(self, code: ErrorCode, message: str, param: str, api_code: str) -> None:
        super().__init__(code, message, param)
        self.api_code = api_code


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error for a client, before a dialect gives it a shape.

    `code` names it for programs: an ErrorCode in lower case, a code of the shell ("unknown_url",
    "method_not_allowed") or of a CodedError, or empty.
    """

    status: int
    message: str
    code: str = ""
    param: str = ""  # the wrong field of the request, if any
    headers: dict[str, str] = field(default_factory=dict)
    request_id: str = ""  # as the answer's header names the request

    @classmethod
    def of(cls, error: Exception) -> "HttpError":
        """Convert a ServiceError as it is, with Retry-After where a retry helps.

        Any other exception is a fault of the server, and the client learns no detail of it: the
        caller logs it.
        """
        if not isinstance(error, ServiceError):
            error = ServiceError(
                INTERNAL, "internal server error; the server's log has the details"
            )
        status = HTTP_STATUS[error.code]
        headers = {}
        if status in RETRY_STATUS:
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        api_code = error.api_code if isinstance(error, CodedError) else ""
        code = api_code or ErrorCode.Name(error.code).lower()
        return cls(status, error.message, code, error.param, headers)


class ErrorShape(Protocol):
    """The error format of one API."""

    statuses: Mapping[int, int]
    """HTTP statuses that the API has instead of others."""

    def error_object(self, error: HttpError) -> dict[str, Any]:
        """The JSON body of an error response."""
        ...

    def error_event(self, error: HttpError) -> Event:
        """The framed last event of a stream that an error ends."""
        ...


class Dialect(ErrorShape, Protocol):
    """One HTTP API. Its streams yield bytes that are framed already (http/responses.py)."""

    paths: tuple[str, ...]
    """Beginnings of the paths on which errors have this dialect's shape."""

    not_offered: tuple[str, ...]
    """Beginnings of what the API has elsewhere and this server does not offer: paths, each with a
    slash at its end, and where another method has the path, a method and a path."""

    request_id_header: str
    """In which its clients look for a request's id; every answer has REQUEST_ID as well."""

    error_model: type[BaseModel]
    """What `error_object` returns, for the description of the API."""

    def add_routes(self, app: FastAPI) -> None:
        """Mount the API's routes, described as in http/docs.py."""
        ...


def dialect_of(dialects: Sequence[Dialect], path: str) -> Dialect:
    """Return the first dialect that has the path, else the last dialect."""
    return next((d for d in dialects if path.startswith(d.paths)), dialects[-1])


def error_response(shape: ErrorShape, error: HttpError) -> JSONResponse:
    """Return an error as a whole response."""
    status = shape.statuses.get(error.status, error.status)
    return JSONResponse(shape.error_object(error), status, error.headers)
