"""The lines of a batch: a request each in the input file, a result each in the output. Pure.

Nothing of an input is trusted: it may be no text, have one endless line, or none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from pdserve.gateway.http.body import num_values
from pdserve.services.host.errors import ServiceError, cut

MAX_LINES = 50_000  # OpenAI's bound
MAX_CUSTOM_ID = 512  # characters
ENVELOPE_BYTES = 8 << 10  # of a line beside its body
BOM = b"\xef\xbb\xbf"
BLANK = b" \t\r\n"


class Span(NamedTuple):
    """Where a line is in its file. `number` counts from 1, blank lines too."""

    number: int
    at: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LineError(Exception):
    """What is wrong with a line, as a batch's `errors` have it."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def as_object(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "line": self.line,
            "message": self.message,
            "param": self.param,
        }


@dataclass(frozen=True, slots=True)
class LineRequest:
    """What a line asks for."""

    custom_id: str
    body: dict[str, Any]


class LineSplitter:
    """Cuts a file that comes piece by piece into its lines; what a line has beyond `max_bytes` is
    counted and not kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept = bytearray()
        self._num_bytes = 0  # of the line that has begun
        self._at = 0  # its first byte
        self._number = 0

    def push(self, data: bytes) -> Iterator[tuple[Span, bytes | None]]:
        """The lines that end in `data`, without blank ones; None for one that is too long."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._keep(data[start:end])
            yield from self._end()
            start = end + 1
        self._keep(data[start:])

    def flush(self) -> Iterator[tuple[Span, bytes | None]]:
        """The last line, if no newline is at its end."""
        yield from self._end()

    def _keep(self, data: bytes) -> None:
        self._num_bytes += len(data)
        self._kept += data[: self._max_bytes + 1 - len(self._kept)]

    def _end(self) -> Iterator[tuple[Span, bytes | None]]:
        line, num_bytes, at = bytes(self._kept), self._num_bytes, self._at
        self._number += 1
        self._at += num_bytes + 1
        self._num_bytes = 0
        self._kept.clear()
        if at == 0 and line.startswith(BOM):
            line, at, num_bytes = line[len(BOM) :], len(BOM), num_bytes - len(BOM)
        if line.strip(BLANK):
            too_long = num_bytes > self._max_bytes
            yield Span(self._number, at, num_bytes), None if too_long else line


def parse_line(line: bytes, endpoint: str) -> LineRequest:
    """Raises LineError, without the line's number."""
    try:
        num_values(line)  # what would take the event loop for long
        value = from_json(line, allow_inf_nan=False)
    except ServiceError:
        raise LineError("invalid_json_line", "This line has too many values.") from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise LineError("invalid_json_line", "This line is not parseable as valid JSON.")
    for name in ("custom_id", "method", "url", "body"):
        if value.get(name) is None:
            text = f"Missing required parameter: '{name}'."
            raise LineError("missing_required_parameter", text, name)
    custom_id, body = value["custom_id"], value["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        text = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters."
        raise LineError("invalid_value", text, "custom_id")
    if value["method"] != "POST":
        raise LineError("invalid_value", "The method must be 'POST'.", "method")
    if value["url"] != endpoint:
        text = f"The url must be the endpoint of the batch, {endpoint}."
        raise LineError("url_mismatch", text, "url")
    if not isinstance(body, dict):
        raise LineError("invalid_value", "The body must be an object.", "body")
    if body.get("stream"):
        raise LineError("invalid_value", "A batch does not stream.", "body.stream")
    return LineRequest(custom_id, body)


class LineChecker:
    """Checks the lines of one file: what each says, that each has a `custom_id` of its own, and
    that they are not too many."""

    def __init__(self, endpoint: str, max_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._seen: set[str] = set()
        self.count = 0

    def check(self, span: Span, line: bytes | None) -> None:
        """Raises LineError."""
        self.count += 1
        if self.count > MAX_LINES:
            raise LineError("too_many_tasks", f"A batch may have {MAX_LINES} requests.")
        if line is None:
            text = f"This line has more than {self._max_bytes} bytes."
            raise LineError("line_too_long", text, None, span.number)
        try:
            request = parse_line(line, self._endpoint)
        except LineError as error:
            raise LineError(error.code, error.message, error.param, span.number) from None
        if request.custom_id in self._seen:
            text = f"The custom_id {cut(request.custom_id, 100)!r} is that of an earlier request."
            raise LineError("duplicate_custom_id", text, "custom_id", span.number)
        self._seen.add(request.custom_id)


def answered(request_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """A line of the output or error file; `body` is the JSON of the answer."""
    head = to_json({"id": f"batch_req_{request_id}", "custom_id": custom_id})[:-1]
    response = to_json({"status_code": status, "request_id": request_id})[:-1]
    return b'%b,"response":%b,"body":%b},"error":null}\n' % (head, response, body or b"null")


def not_run(request_id: str, custom_id: str, code: str, message: str) -> bytes:
    """A line of the error file for a request that had no answer."""
    line = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return to_json(line) + b"\n"


def body_of(request: LineRequest) -> bytes:
    """The body as a client would send it."""
    return to_json(request.body)
