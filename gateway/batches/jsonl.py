"""Parses the input lines of a batch (one JSON request each) and writes its output and error lines
(one JSON result each). Pure.

The input file is untrusted: it may be binary, a single huge line, or empty.
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
    """The position of a line in the input file: its number from 1, counting blank lines, its first
    byte `at`, and its length in bytes."""

    number: int
    at: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LineError(Exception):
    """An error in a line of the input file; clients see it in the `errors` of the batch."""

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
    """The valid request of one input line: the client's `custom_id` and the body for the API."""

    custom_id: str
    body: dict[str, Any]


class LineSplitter:
    """Splits a file that arrives in pieces into lines. Of a line longer than `max_bytes`, only the
    length is recorded, so memory stays bounded."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._line = bytearray()
        self._num_bytes = 0  # of the current line
        self._offset = 0  # position of its first byte
        self._number = 0

    def push(self, data: bytes) -> Iterator[tuple[Span, bytes | None]]:
        """Add a piece of the file and yield each line that it completes, with its position; blank
        lines are skipped. The content is None for a line longer than `max_bytes`."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._keep(data[start:end])
            yield from self._end()
            start = end + 1
        self._keep(data[start:])

    def flush(self) -> Iterator[tuple[Span, bytes | None]]:
        """End the file and yield its last line if the file does not end with a newline."""
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
    """Parse an input line and return its request. Raises LineError, with `line` None, if it is not
    a valid request to `endpoint`."""
    try:
        num_values(line)  # refuse values that would block the event loop for long
        value = from_json(line, allow_inf_nan=False)
    except ServiceError:
        raise LineError(
            "invalid_json_line", "This line has more JSON values than a request may have."
        ) from None
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
        raise LineError(
            "invalid_value", "The method of a request in a batch must be 'POST'.", "method"
        )
    if value["url"] != endpoint:
        text = f"The url must be the endpoint of the batch, {endpoint}."
        raise LineError("url_mismatch", text, "url")
    if not isinstance(body, dict):
        raise LineError(
            "invalid_value", "The body of a request in a batch must be a JSON object.", "body"
        )
    if body.get("stream"):
        raise LineError("invalid_value", "Requests in a batch cannot stream.", "body.stream")
    return LineRequest(custom_id, body)


class LineChecker:
    """Validates the lines of one input file in order: each must be a valid request with a
    `custom_id` that no earlier line has, and there may be at most MAX_LINES."""

    def __init__(self, endpoint: str, max_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._seen: set[str] = set()
        self.count = 0

    def check(self, span: Span, line: bytes | None) -> None:
        """Validate the next line, which is None if it is too long. Raises LineError if it is
        invalid."""
        self.count += 1
        if self.count > MAX_LINES:
            raise LineError(
                "too_many_tasks", f"The input file has more than {MAX_LINES} requests, the maximum."
            )
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
    """Return the line of the output or error file for a request that the API answered, with an HTTP
    status and a JSON body."""
    head = to_json({"id": f"batch_req_{request_id}", "custom_id": custom_id})[:-1]
    response = to_json({"status_code": status, "request_id": request_id})[:-1]
    return b'%b,"response":%b,"body":%b},"error":null}\n' % (head, response, body or b"null")


def not_run(request_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the line of the error file for a request that was never run, with the reason as error
    `code` and `message`."""
    line = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return to_json(line) + b"\n"
