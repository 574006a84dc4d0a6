"""Formats log records, one line each, with time, level, component, message and request id.

The process's main configures the root logger once. A line is text for people, or a JSON object for
log collectors.
"""

import json
import logging
import os
import sys
import threading
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

log = logging.getLogger(__name__)

ROTATE_BYTES = 1 << 20  # size at which a kept log file rotates


class LineFormatter(logging.Formatter):
    """Formats a log record as text: `12:00:01.123 INFO    router  message  request=...`. The
    request id comes from extra={"request": id}."""

    def __init__(self, component: str) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s", "%H:%M:%S")
        self._component = component

    def formatMessage(self, record: logging.LogRecord) -> str:
        # Ids and peers' names come from outside: a line break in one must not forge a line.
        message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        request = getattr(record, "request", "")
        suffix = f"  request={request!s}".replace("\n", "\\n") if request else ""
        record.message = f"{self._component}  {message}{suffix}"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """Formats a log record as a JSON object with `time` (UTC), `level`, `component`, `logger` and
    `message`, and with `request_id` and `exception` if the record has them."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := getattr(record, "request", ""):
            line["request_id"] = str(request)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(
    component: str, level: str = "info", stream: TextIO | None = None, log_format: str = "text"
) -> None:
    """Write all log records of `level` and above to `stream` (default: standard error). If
    `log_format` is json, Python's warnings and uncaught exceptions are logged as JSON too."""
    root = logging.getLogger()
    file_handlers = [
        handler for handler in root.handlers if isinstance(handler, RotatingFileHandler)
    ]
    root.handlers[:] = [logging.StreamHandler(stream or sys.stderr), *file_handlers]
    for handler in root.handlers:
        handler.setFormatter(
            JsonFormatter(component) if log_format == "json" else LineFormatter(component)
        )
    root.setLevel(level.upper())
    if log_format == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_thread


def keep_log(path: Path) -> None:
    """Write all log records also to the file `path`. At 1 MiB it becomes `path`.1 and a new file
    begins, so one to two MiB of the log are kept."""
    handler = RotatingFileHandler(path, maxBytes=ROTATE_BYTES, backupCount=1, delay=True)
    logging.getLogger().addHandler(handler)


def quiet_grpc_core(log_format: str) -> None:
    """Silence the log lines of gRPC's C core if this process logs JSON, since those lines are not
    JSON; the error of a failed call carries the same information. Call before gRPC is imported."""
    if log_format == "json":
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def logs_json() -> bool:
    """Whether this process writes its log as JSON."""
    return any(isinstance(h.formatter, JsonFormatter) for h in logging.getLogger().handlers)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: object) -> None:
    log.critical("unexpected failure", exc_info=error)


def _log_thread(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else "?"
    log.critical("unexpected failure of thread %s", name, exc_info=args.exc_value)
