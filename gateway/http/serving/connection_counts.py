"""How many connections each of several gateway processes holds that accept from one socket.

The one with the fewest accepts the next, so that even a few connections that last are spread. The
counts are in memory that the processes share (a file); each writes its own alone.
"""

import mmap
import os
from pathlib import Path

UNREADY = 1 << 20  # more than a process can hold: the others are asked first
_ITEM_BYTES = 4


class ConnectionCounts:
    """The process `index` of `num`; it is unready at first. Raises OSError."""

    def __init__(self, path: Path, index: int, num: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(file, num * _ITEM_BYTES)  # which keeps what the others have written
            self._all = memoryview(mmap.mmap(file, num * _ITEM_BYTES)).cast("i")
        finally:
            os.close(file)
        self._index = index
        self._all[index] = UNREADY

    def set_ready(self) -> None:
        """The process answers from now on."""
        self._all[self._index] -= UNREADY

    def set_unready(self) -> None:
        """It takes no more, although it still holds some."""
        self._all[self._index] += UNREADY

    def add(self, num: int) -> None:
        """So many more connections; less, if it is negative."""
        self._all[self._index] += num

    def is_fewest(self) -> bool:
        """Whether no other process has fewer."""
        return self._all[self._index] <= min(self._all)
