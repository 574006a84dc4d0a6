"""The lines of a batch: one request per line in the input file, one result per line in the output.
Pure.

The input is untrusted: it may be binary, one endless line, or empty.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from pdserve.gateway.http.body import num_values
from pdserve.services.common.errors import ServiceError, cut

MAX_LINES = 50_000  # OpenAI's bound
MAX_CUSTOM_ID = 512  # characters
ENVELOPE_BYTES = 8 << 10  # size of a line without its body
BOM = b"\xef\xbb\xbf"
BLANK = b" \t\r\n"


class Span(NamedTuple):
    """The position of a line in its file. `number` counts from 1 and includes blank lines."""

    number: int
    at: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LineError(Exception):
    """An error in a line, as in a batch's `errors`."""

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
    """The request in a line."""

    custom_id: str
    body: dict[str, Any]


class LineSplitter:
    """Splits a file that arrives piece by piece into lines. Bytes of a line beyond `max_bytes` are
    counted but not kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._line = bytearray()
        self._num_bytes = 0  # of the current line
        self._offset = 0  # position of its first byte
        self._number = 0

    def push(self, data: bytes) -> Iterator[tuple[Span, bytes | None]]:
        """The lines that end in `data`, without blank ones; None for a line that is too long."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._keep(data[start:end])
            yield from self._end()
            start = end + 1
        self._keep(data[start:])

    def flush(self) -> Iterator[tuple[Span, bytes | None]]:
        """The last line, if it does not end with a newline."""
        yield from self._end()

    def _keep(self, data: bytes) -> None:
        self._num_bytes += len(data)
        self._line += data[: self._max_bytes + 1 - len(self._line)]

    def _end(self) -> Iterator[tuple[Span, bytes | None]]:
        line, num_bytes, offset = bytes(self._line), self._num_bytes, self._offset
        self._number += 1
        self._offset += num_bytes + 1
        self._num_bytes = 0
        self._line.clear()
        if offset == 0 and line.startswith(BOM):
            line, offset, num_bytes = line[len(BOM) :], len(BOM), num_bytes - len(BOM)
        if line.strip(BLANK):
            too_long = num_bytes > self._max_bytes
            yield Span(self._number, offset, num_bytes), None if too_long else line


def parse_line(line: bytes, endpoint: str) -> LineRequest:
    """Parse a line. Raises LineError, without the line's number, if it is not a valid request."""
    try:
        num_values(line)  # refuse values that would block the event loop for long
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
        raise LineError("invalid_value", "Requests in a batch cannot stream.", "body.stream")
    return LineRequest(custom_id, body)


class LineChecker:
    """Checks the lines of one file: each is a valid request, `custom_id` is unique, and their
    number is within MAX_LINES."""

    def __init__(self, endpoint: str, max_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._seen: set[str] = set()
        self.count = 0

    def check(self, span: Span, line: bytes | None) -> None:
        """Check a line. Raises LineError if it is invalid."""
        self.count += 1
        if self.count > MAX_LINES:
            raise LineError("too_many_tasks", f"A batch may have at most {MAX_LINES} requests.")
        if line is None:
            text = f"This line has more than {self._max_bytes} bytes."
            raise LineError("line_too_long", text, None, span.number)
        try:
            request = parse_line(line, self._endpoint)
        except LineError as error:
            raise LineError(error.code, error.message, error.param, span.number) from None
        if request.custom_id in self._seen:
            text = f"The custom_id {cut(request.custom_id, 100)!r} is used by an earlier request."
            raise LineError("duplicate_custom_id", text, "custom_id", span.number)
        self._seen.add(request.custom_id)


def answered(request_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """A line of the output or error file; `body` is the JSON of the response."""
    head = to_json({"id": f"batch_req_{request_id}", "custom_id": custom_id})[:-1]
    response = to_json({"status_code": status, "request_id": request_id})[:-1]
    return b'%b,"response":%b,"body":%b},"error":null}\n' % (head, response, body or b"null")


def not_run(request_id: str, custom_id: str, code: str, message: str) -> bytes:
    """A line of the error file for a request without a response."""
    line = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return to_json(line) + b"\n"
