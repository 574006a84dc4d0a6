"""Reads request bodies within limits: JSON bodies, and forms with one file.

A JSON body has limits on its bytes, on the time to receive it and on its nesting (200 levels, by
the parser); all bodies together have a limit on bytes; NaN is refused. Parsing blocks the event
loop for a time that depends on the number of values in the body, so that number is limited too.
Each pass of the event loop parses at most one body over SMALL_BYTES, and tenants take turns.

A form is parsed while it is received, and its file is passed on in pieces. Limits apply to the
number of fields, the bytes of each, the headers of each part, and the time: `body_timeout_s` for
the whole form plus one second for each PACE bytes.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from pydantic_core import from_json
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from pdserve.gateway.caller import Caller
from pdserve.gateway.http.api import HttpLimits
from pdserve.gateway.http.guard import caller_of
from pdserve.protos.common_pb2 import CANCELLED, INVALID_ARGUMENT, OVERLOADED
from pdserve.services.common.errors import ServiceError, quoted
from pdserve.services.common.fairness import FairSemaphore, FairShare

MAX_VALUES = 1 << 19  # in one body; parsing that many takes about 0.1 s
SMALL_BYTES = 1 << 13  # of a body that is parsed at once: within 2 ms, whatever its content
VALUE_BYTES = 64  # memory of a parsed value, about

T = TypeVar("T")


class BodyReader:
    """Reads the request bodies of all APIs. Bodies count against `max_bodies_bytes`, including
    their parsed values, from the first byte until the request is answered; each tenant has a fair
    share of that limit (FairShare)."""

    def __init__(self, limits: HttpLimits) -> None:
        self._max_bytes = limits.max_body_bytes
        self._limit_s = limits.body_timeout_s
        self._held = FairShare(limits.max_bodies_bytes)
        self._parsing = FairSemaphore(1)

    async def read(self, request: Request, check: Callable[[dict[str, Any]], T]) -> T:
        """Receive and parse the JSON body of a request, and return `check(object)`. A `check` that
        takes long is allowed: large bodies are checked one at a time.

        Raises HTTPException 415 for a compressed body or a content type other than JSON (web pages
        of any origin may send other types), 413 for a body that is too large and 408 for one that
        is too slow; ServiceError INVALID_ARGUMENT for invalid JSON, and OVERLOADED if all bodies
        together exceed the limit.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise HTTPException(415, "the body must be JSON, with 'Content-Type: application/json'")
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            text = f"compressed bodies are not supported; remove 'Content-Encoding: {coding[:40]}'"
            raise HTTPException(415, text)
        declared = _declared_bytes(request)
        if declared is None or declared > self._max_bytes:
            raise self._too_large()
        caller = caller_of(request)
        owner = caller.tenant.id
        data = bytearray()
        try:
            await self._receive(request, owner, data)
        finally:
            self._return_at_end(caller, len(data))
        if len(data) <= SMALL_BYTES:
            return check(self._parse(caller, data))
        async with self._parsing.turn(owner):
            await asyncio.sleep(0)  # lets what was parsed before go on
            return check(self._parse(caller, data))

    def hold(self, caller: Caller, amount: int) -> None:
        """Count `amount` further bytes of memory for a request, besides its body, until it is
        answered. Raises ServiceError OVERLOADED if they exceed the limit of all bodies."""
        self._take(caller.tenant.id, amount)
        self._return_at_end(caller, amount)

    def _parse(self, caller: Caller, data: bytearray) -> dict[str, Any]:
        self.hold(caller, num_values(data) * VALUE_BYTES)
        return parse_object(data)

    def _take(self, owner: bytes, amount: int) -> None:
        if not self._held.has_room(owner, amount):
            raise ServiceError(
                OVERLOADED, "too many request bodies at once; retry later", retry_after_s=1.0
            )
        self._held.take(owner, amount)

    def _return_at_end(self, caller: Caller, amount: int) -> None:
        if amount:
            caller.at_end.callback(self._held.give_back, caller.tenant.id, amount)

    async def _receive(self, request: Request, owner: bytes, data: bytearray) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                async for chunk in request.stream():
                    if len(data) + len(chunk) > self._max_bytes:
                        raise self._too_large()
                    self._take(owner, len(chunk))
                    data += chunk
        except TimeoutError:
            raise HTTPException(
                408, f"the body was not received within {self._limit_s:g} s"
            ) from None
        except ClientDisconnect:
            raise ServiceError(CANCELLED, "the client closed the connection") from None

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than {self._max_bytes} bytes")


def _declared_bytes(request: Request) -> int | None:
    """Return the value of the Content-Length header: 0 if it is missing, None if it is not a valid
    number."""
    declared = request.headers.get("content-length", "0")
    return int(declared) if declared.isdecimal() and len(declared) <= 18 else None


def num_values(data: bytes | bytearray) -> int:
    """Return an upper bound on the number of values and keys in a JSON text, without parsing it:
    the count of `,`, `:`, `[` and `{`, which includes those inside strings. Raises ServiceError
    INVALID_ARGUMENT if it exceeds MAX_VALUES."""
    count = sum(data.count(mark) for mark in b",:[{")
    if count > MAX_VALUES:
        raise ServiceError(INVALID_ARGUMENT, f"the body has more than {MAX_VALUES} values and keys")
    return count


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object. Raises ServiceError INVALID_ARGUMENT for invalid JSON or another type of
    value."""
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        text = str(error)
        if "recursion limit" in text:
            text = "it is nested too deeply"
        raise ServiceError(INVALID_ARGUMENT, f"the body is not valid JSON: {text}") from None
    if not isinstance(value, dict):
        raise ServiceError(INVALID_ARGUMENT, "the body must be a JSON object")
    return value


PACE = 64 << 10  # bytes in a second
MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
MAX_HEAD_BYTES = 2048  # of a part
MAX_BOUNDARY = 70  # RFC 2046
MAX_OVERHEAD = MAX_FIELDS * (MAX_FIELD_BYTES + MAX_HEAD_BYTES)  # besides the file
FILE = "file"


class FileForm:
    """Parser of a multipart form with one file. Read `pieces` to the end; then `fields` and
    `filename` are complete."""

    def __init__(self, request: Request, max_file_bytes: int, timeout_s: float) -> None:
        """Prepare to parse the request's form. Raises HTTPException 415 if its content type is not
        multipart/form-data."""
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= MAX_BOUNDARY:
            raise HTTPException(
                415, "the body must be a form, with 'Content-Type: multipart/form-data'"
            )
        self._request = request
        self._max_file_bytes = max_file_bytes
        self._timeout_s = timeout_s
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # None: no file has come
        self.file_bytes = 0
        self._names: set[str] = set()
        self._part = _Part()
        self._file = bytearray()  # received and not yet yielded
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._part.add_name(data[start:end]),
                "on_header_value": lambda data, start, end: self._part.add_value(data[start:end]),
                "on_header_end": lambda: self._part.end_header(),
                "on_headers_finished": self._begin_data,
                "on_part_data": self._data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )
        self._ended = False

    async def pieces(self, piece_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yield the file's content in pieces of `piece_bytes`; the last may be shorter. Raises
        ServiceError for a malformed form or a missing file, HTTPException 413 for a file that is
        too large and 408 for a client that sends too slowly."""
        declared = _declared_bytes(self._request)
        if declared is None:
            raise _invalid_form("the Content-Length header is not a valid number")
        if declared > self._max_file_bytes + MAX_OVERHEAD:
            raise self._too_large()
        received = 0
        chunks = self._request.stream()
        loop = asyncio.get_running_loop()
        started, waited_elsewhere = loop.time(), 0.0
        while True:
            deadline = started + waited_elsewhere + self._timeout_s + received / PACE
            try:
                async with asyncio.timeout_at(deadline):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise HTTPException(
                    408,
                    f"the upload took over {self._timeout_s:g} s plus 1 s for each {PACE} bytes",
                ) from None
            except ClientDisconnect:
                raise ServiceError(CANCELLED, "the client closed the connection") from None
            if chunk is None:
                break
            received += len(chunk)
            if received > self._max_file_bytes + MAX_OVERHEAD:
                raise self._too_large()
            self._parse(chunk)
            began = loop.time()
            while len(self._file) >= piece_bytes:
                piece = bytes(self._file[:piece_bytes])
                del self._file[:piece_bytes]
                yield piece
            waited_elsewhere += loop.time() - began
        if not self._ended:
            raise _invalid_form("the form is incomplete: its end is missing")
        if self.filename is None:
            raise ServiceError(INVALID_ARGUMENT, "file is required", param=FILE)
        if self._file:
            yield bytes(self._file)

    def _parse(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError:
            raise _invalid_form("the body is not a valid multipart form") from None

    def _begin_part(self) -> None:
        if len(self._names) >= MAX_FIELDS:
            raise _invalid_form(f"the form has more than {MAX_FIELDS} fields")
        self._part = _Part()

    def _begin_data(self) -> None:
        part = self._part
        part.read_head()
        if part.name in self._names:
            raise ServiceError(
                INVALID_ARGUMENT,
                f"the form field {quoted(part.name)} occurs more than once",
                part.name,
            )
        self._names.add(part.name)
        if part.name == FILE:
            self.filename = part.filename or FILE

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part.name == FILE:
            self.file_bytes += end - start
            if self.file_bytes > self._max_file_bytes:
                raise self._too_large()
            self._file += memoryview(data)[start:end]
            return
        self._part.value += data[start:end]
        if len(self._part.value) > MAX_FIELD_BYTES:
            name = self._part.name
            raise ServiceError(
                INVALID_ARGUMENT,
                f"the form field {quoted(name)} is longer than {MAX_FIELD_BYTES} bytes",
                param=name,
            )

    def _end_part(self) -> None:
        if self._part.name != FILE:
            self.fields[self._part.name] = self._part.value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the file is larger than {self._max_file_bytes} bytes")


class _Part:
    """One part of a multipart form: its headers, and its value unless it is the file."""

    def __init__(self) -> None:
        self.name = ""
        self.filename = ""
        self.value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._header = bytearray(), bytearray()
        self._head_bytes = 0

    def add_name(self, data: bytes) -> None:
        self._count(data)
        self._header[0].extend(data)

    def add_value(self, data: bytes) -> None:
        self._count(data)
        self._header[1].extend(data)

    def end_header(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = bytearray(), bytearray()

    def read_head(self) -> None:
        """Parse the part's headers into `name` and `filename`. Raises ServiceError if the part has
        no name."""
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or not options.get(b"name"):
            raise _invalid_form("a part of the form has no name")
        self.name = _printable(options[b"name"])
        self.filename = _printable(options.get(b"filename", b""))

    def _count(self, data: bytes) -> None:
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _invalid_form(
                f"the headers of a form part are longer than {MAX_HEAD_BYTES} bytes"
            )


def _printable(data: bytes) -> str:
    """Decode a name for log lines: unprintable characters become `?`, and at most 255 are kept."""
    text = data.decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)[:255]


def _invalid_form(message: str) -> ServiceError:
    return ServiceError(INVALID_ARGUMENT, message)
