"""The files of `pdserve complete`: requests in, results out. The output is also the state: a line
with a result is done.

A line is like those of OpenAI's batches (custom_id, url, body), or a body with "prompt" or
"messages" and optionally an "id".

Each line is appended with one write, so that a run may end at any time; the next start removes a
line torn by a full disk or a crash. A lock excludes a second run.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
URLS = (PLAIN, CHAT, "/v1/embeddings", "/v1/responses")
IDS = ("custom_id", "id")


class BadLine(Exception):
    """A line is not a valid request; the message says why."""


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line's request, and the id of its result."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def line_id(line: Mapping[str, Any], number: int) -> str:
    """The line's own id, or its number (from 1)."""
    for name in IDS:
        if isinstance(line.get(name), str | int) and line[name] != "":
            return str(line[name])
    return f"line-{number}"


def parse_line(data: bytes) -> Mapping[str, Any]:
    """Raises BadLine if the line is not a JSON object."""
    try:
        line = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadLine(f"the line is not JSON: {error}") from None
    if not isinstance(line, dict):
        raise BadLine("the line is not a JSON object")
    return line


def request_of(line: Mapping[str, Any], custom_id: str, defaults: Mapping[str, Any]) -> InputLine:
    """The line's request; `defaults` are fields for bodies that lack them. Raises BadLine if the
    line has no valid request."""
    if "body" in line:
        body, url = line["body"], line.get("url", CHAT)
        if not isinstance(body, dict):
            raise BadLine("body must be an object")
        if url not in URLS:
            raise BadLine(f"url must be one of {', '.join(URLS)}, not {str(url)[:80]!r}")
    elif "messages" in line or "prompt" in line:
        body = {name: value for name, value in line.items() if name not in IDS}
        url = CHAT if "messages" in line else PLAIN
    else:
        raise BadLine('the line has neither "body" nor "messages" nor "prompt"')
    return InputLine(custom_id, url, {**defaults, **body, "stream": False})


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line) for lines that are not blank."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, line


def answer_line(custom_id: str, status: int, body: Any) -> dict[str, Any]:
    """The result of a line with a response of any status."""
    return {
        "custom_id": custom_id,
        "response": {"status_code": status, "body": body},
        "error": None,
    }


def error_line(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """The result of a line that could not be sent."""
    return {"custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}


def failed(result: Mapping[str, Any]) -> bool:
    response = result.get("response")
    return not response or response.get("status_code") != 200


class ResultError(Exception):
    """The run cannot continue with this output; the message says why."""


class ResultFile:
    """Owns the file while it is open."""

    def __init__(self, path: Path) -> None:
        """Raises OSError; ResultError if the file has lines that are not results."""
        self._path = path
        self.done: set[str] = set()
        self.num_failed = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def add(self, result: Mapping[str, Any]) -> None:
        """Append a result. Raises OSError, after which the file still ends with a whole line."""
        data = (json.dumps(result, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        end = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, data)
            if written < len(data):  # the disk is full
                os.write(self._descriptor, data[written:])
        except OSError:
            os.ftruncate(self._descriptor, end)
            raise
        self.done.add(str(result["custom_id"]))
        self.num_failed += failed(result)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultError(f"{self._path}: another run is writing to it") from None

    def _read(self) -> None:
        """Record the finished lines, and remove a torn last line."""
        end = 0
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                if line.strip():
                    self._add_line(line, number)
            size = file.seek(0, os.SEEK_END)
            if size > end:
                file.seek(end)
                first_byte = file.read(1)
                if first_byte != b"{":
                    raise ResultError(
                        f"{self._path}: its last line is not a result; choose a new file"
                    )
        if size > end:
            os.ftruncate(self._descriptor, end)

    def _add_line(self, line: bytes, number: int) -> None:
        try:
            result = json.loads(line)
            custom_id, response, _ = (result[name] for name in ("custom_id", "response", "error"))
        except (ValueError, KeyError, TypeError):
            custom_id = response = None
        if not isinstance(custom_id, str) or not isinstance(response, dict | None):
            raise ResultError(f"{self._path}: line {number} is not a result; choose a new file")
        if custom_id in self.done:
            raise ResultError(f"{self._path}: line {number} repeats the id {custom_id!r}")
        self.done.add(custom_id)
        self.num_failed += failed(result)
