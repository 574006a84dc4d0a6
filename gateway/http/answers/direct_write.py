"""A shortcut past the tasks of a streamed answer, for an event that can be sent at once."""

from collections.abc import Callable
from time import monotonic


class DirectWrite:
    """The direct write of one answer, whose stream (replies.py) opens and closes it."""

    def __init__(self) -> None:
        self._write: Callable[[bytes], bool] | None = None
        self.last_write = 0.0  # a reading of time.monotonic

    def open(self, write: Callable[[bytes], bool] | None) -> None:
        """Set `write`, which sends a piece of the body at once, or only returns False."""
        self._write = write

    def close(self) -> None:
        self._write = None

    def write(self, event: bytes) -> bool:
        """Send a short event; False: it has to go the usual way.

        Call it only when all earlier events have been sent.
        """
        if self._write is None or not self._write(event):
            return False
        self.last_write = monotonic()
        return True
