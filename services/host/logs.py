"""One line per record: time, level, component, message, and the request it belongs to.

The root logger is configured once, by the process's main.
"""

import logging
import sys
from typing import TextIO


class LineFormatter(logging.Formatter):
    """`12:00:01.123 INFO  router  message  request=...`; give the id as extra={"request": id}."""

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


def configure_logging(component: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Send all records of `level` and above to the stream (standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(component))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
