"""The output of `pdserve complete`, which is also its state: a line with a result is done.

Each line is appended with one write, so that a run may end at any time; the next start removes a
line torn by a full disk or a crash. A lock excludes a second run.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from pdserve.services.cli.complete.lines import failed


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
